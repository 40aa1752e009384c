"""Pooling compared with its formulas and with sentence-transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.embedding.pooling import pool
from jaxinfer.loading.sentence_options import POOLING_MODES

LENGTHS = np.array([5, 1, 3], np.int32)
HIDDEN = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)


def pool_by_formula(x: np.ndarray, mode: str) -> np.ndarray:
    """Pool the hidden states [n, D] of one text."""
    n = len(x)
    weight = np.arange(1, n + 1)[:, None]
    return {
        "cls": x[0],
        "max": x.max(axis=0),
        "mean": x.sum(axis=0) / n,
        "mean_sqrt_len_tokens": x.sum(axis=0) / n**0.5,
        "weightedmean": (x * weight).sum(axis=0) / weight.sum(),
        "lasttoken": x[-1],
    }[mode]


@pytest.mark.parametrize("padding", [0.0, 1e9, np.nan])
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_pooling_mode_equals_its_formula_with_any_padding(mode, padding):
    hidden = HIDDEN.copy()
    for row, length in enumerate(LENGTHS):
        hidden[row, length:] = padding
    found = np.asarray(pool(jnp.asarray(hidden), jnp.asarray(LENGTHS), (mode,)))
    for row, length in enumerate(LENGTHS):
        expected = pool_by_formula(HIDDEN[row, :length].astype(np.float64), mode)
        assert np.abs(found[row] - expected).max() < 1e-6


def test_several_modes_are_concatenated_in_order():
    modes = ("cls", "mean")
    found = pool(jnp.asarray(HIDDEN), jnp.asarray(LENGTHS), modes)
    apart = [pool(jnp.asarray(HIDDEN), jnp.asarray(LENGTHS), (mode,)) for mode in modes]
    assert np.array_equal(found, np.concatenate(apart, axis=1))


def test_pooling_sums_in_float32():
    hidden = jnp.full((1, 4096, 1), 1.0009765625, jnp.float16)  # 1 + 2^-10: float16 stops at 2048
    found = pool(hidden, jnp.asarray([4096], jnp.int32), ("mean",))
    assert found.dtype == jnp.float32 and float(found[0, 0]) == 1.0009765625


@pytest.mark.parity
def test_pooling_equals_sentence_transformers():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    name, reason = "sentence_transformers.sentence_transformer.modules", "not installed"
    pooling = pytest.importorskip(name, reason=reason).Pooling(8, POOLING_MODES)
    mask = torch.tensor((np.arange(5) < LENGTHS[:, None]).astype(np.int64))
    features = {"token_embeddings": torch.tensor(HIDDEN), "attention_mask": mask}
    expected = pooling(features)["sentence_embedding"].numpy()
    found = np.asarray(pool(jnp.asarray(HIDDEN), jnp.asarray(LENGTHS), POOLING_MODES))
    assert np.abs(found - expected).max() < 1e-6
