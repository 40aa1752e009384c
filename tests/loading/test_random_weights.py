"""Random weights for any configuration, without weights on disk: finite and seeded."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, CheckpointError, EngineConfig, SamplingParams
from jaxinfer.config import load_config
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model
from jaxinfer.loading.random import random_weights
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from tests.support import running
from tests.support.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write a directory with a configuration and a tokenizer, without weights."""
    directory = write_checkpoint("all_biases_tied_mqa", tmp_path_factory.mktemp("random"))
    (directory / "model.safetensors").unlink()
    return directory


def drawn(model: FunctionalModel, seed: int = 0) -> tuple[jax.Array, ...]:
    # Without `quantize`, all of them are arrays.
    return random_weights(model, seed)  # type: ignore[return-value]


def model_of(folder: Path, dtype: str = "float32") -> FunctionalModel:
    checkpoint = open_checkpoint(folder, needs_weights=False)
    return functional_model(checkpoint, Numerics(np.dtype(jnp.dtype(dtype))))


def test_random_matrices_have_variance_one_over_inputs(folder):
    model = model_of(folder)
    weights = dict(zip((p.path for p in model.parameters), drawn(model, 1), strict=True))
    assert {p.path: (p.shape, p.dtype) for p in model.parameters} == {
        path: (w.shape, w.dtype) for path, w in weights.items()
    }
    for path, weight in weights.items():
        if "norm" in path:
            np.testing.assert_array_equal(weight, 1)
        elif "bias" in path:
            np.testing.assert_array_equal(weight, 0)
    up = np.asarray(weights["blocks.0.mlp.gate_up"])  # [2, 32, 48]
    assert up.std() == pytest.approx(32**-0.5, rel=0.1)
    down = np.asarray(weights["blocks.0.mlp.down.weight"])  # [48, 32]
    assert down.std() == pytest.approx(48**-0.5, rel=0.1)
    assert np.asarray(weights["embed.weight"]).std() == pytest.approx(32**-0.5, rel=0.1)


def test_random_weights_depend_on_seed_and_parameter(folder):
    model = model_of(folder, "bfloat16")
    one, again, other = (drawn(model, seed) for seed in (1, 1, 2))
    matrices = [
        i for i, p in enumerate(model.parameters) if len(p.dims) > 1 and "bias" not in p.path
    ]
    for i in matrices:
        np.testing.assert_array_equal(one[i], again[i])
        assert not np.array_equal(one[i], other[i])
    same_shape = [one[i] for i in matrices if one[i].shape == one[matrices[0]].shape]
    assert len(same_shape) > 1 and not np.array_equal(same_shape[0], same_shape[1])


def test_random_weights_give_finite_logits_that_differ_by_token(folder):
    model = model_of(folder)
    logits = running.all_logits(model, drawn(model), list(range(1, 20)))
    assert np.isfinite(logits).all()
    assert 0.1 < np.std(logits) < 10


CONFIG = {
    "load_format": "random",
    "warm_up": False,
    "max_model_len": 64,
    "cache": {"page_size": 16, "num_pages": 8},
    "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 1},
}


def test_engine_runs_a_config_without_weights_or_tokenizer(folder, tmp_path):
    alone = tmp_path / "some_model.json"
    alone.write_text((folder / "config.json").read_text())
    llm = LLM(alone, running.from_mapping(CONFIG), show_progress=False)
    assert llm.engine.name == "some_model"
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [output] = llm.generate([[5, 6, 7]], params)
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate(["text"], params)


def test_directory_without_weights_is_refused_with_the_random_option(folder, tmp_path):
    with pytest.raises(CheckpointError, match="--set load_format=random"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="--set load_format=random"):
        open_checkpoint(folder / "config.json")
    assert load_config(overrides=["load_format=random"]) == EngineConfig(load_format="random")


@pytest.mark.parametrize("claim", [1_001, 10**7])
def test_too_many_layers_are_refused(claim, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": claim}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{claim:,} layers.*1,000"):
        model_of(tmp_path)


def test_random_weights_are_on_the_default_device(folder):
    weights = drawn(model_of(folder))
    assert {device for w in weights for device in w.devices()} == {jax.devices()[0]}
