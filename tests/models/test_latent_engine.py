"""The engine's invariants for latent attention and experts, and the file formats of DeepSeek-V3.

A request's tokens do not depend on the batch; in batch-invariant mode neither do their bits.
"""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.nn.layers import Numerics
from tests.support import running
from tests.support.families_deepseek import CASES
from tests.support.family_bench import make_tensors, recorded, write_huggingface

NAME = "deepseek_v3"
# Steps have one size, so that each engine compiles one program.
ONE_SIZE: dict[str, Any] = {"scheduler": {"max_num_batched_tokens": 16}, "min_bucket": 16}


@cache
def tensors() -> dict[str, np.ndarray]:
    return make_tensors(recorded("deepseek")[NAME]["shapes"], CASES[NAME].seed)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that loads the tiny DeepSeek-V3 with given numerics."""
    folder = write_huggingface(CASES[NAME], tensors(), tmp_path_factory.mktemp("deepseek"))
    return cache(lambda is_invariant: running.load(folder, Numerics(batch_invariant=is_invariant)))


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Return requests, greedy and sampled, whose prompts share prefixes and need several steps."""
    rng = random.Random(0)
    prefix = [rng.randrange(3, 160) for _ in range(40)]
    found = []
    for i in range(7):
        prompt = prefix[: rng.choice([0, 16, 40])] + [
            rng.randrange(3, 160) for _ in range(3 * i + 1)
        ]
        params = SamplingParams(
            temperature=[0.0, 0.9][i % 2], seed=i, logprobs=2, max_tokens=10, ignore_eos=True
        )
        found.append((prompt, params))
    return found


def run(engine, *, is_alone: bool) -> list[Any]:
    """Run the requests with an empty prefix cache, on pages filled with NaN (99 if quantized)."""
    poison = lambda a: jnp.full_like(a, 99 if a.dtype == jnp.int8 else jnp.nan)
    state = engine.runner.state
    engine.runner.state = state._replace(pages=jax.tree.map(poison, state.pages))
    engine.clear_prefix_cache()
    added = []
    for prompt, params in requests():
        added += engine.add(prompt, params)
        if is_alone:
            running.run(engine)
            engine.clear_prefix_cache()
    running.run(engine)
    return added


@pytest.mark.parametrize(("is_invariant", "dtype"), [(False, "model"), (True, "int8")])
def test_concurrent_requests_equal_each_alone(load, is_invariant, dtype):
    """The pool is too small for all requests, so that some are preempted and recomputed."""
    cache = {"dtype": dtype, "num_pages": 14}
    options = {**ONE_SIZE, "batch_invariant": is_invariant, "cache": cache}
    model, weights = load(is_invariant)
    engine = running.engine(model, weights, options)
    expected = run(engine, is_alone=True)
    assert engine.scheduler.num_preemptions == 0
    together = run(engine, is_alone=False)
    assert engine.scheduler.num_preemptions > 0 and engine.scheduler.num_shared_tokens > 0
    assert running.tokens_of(together) == running.tokens_of(expected)
    if is_invariant:
        assert [r.logprobs for r in together] == [r.logprobs for r in expected]
    [pages, *_] = engine.runner.state.pages
    assert pages.v is None and pages.k.shape[1:] == (1, 8, 24)


def test_multi_token_prediction_module_is_not_loaded(load, tmp_path):
    """The file has the module's tensors; they are not used."""
    further = {
        "model.layers.2.eh_proj.weight": np.ones((32, 64), np.float32),
        "model.layers.2.self_attn.o_proj.weight": np.full((32, 48), np.nan, np.float32),
    }
    _, weights = running.load(write_huggingface(CASES[NAME], tensors() | further, tmp_path))
    for one, other in zip(weights, load(False)[1], strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    wrong = tensors() | {"model.layers.3.eh_proj.weight": np.ones((32, 64), np.float32)}
    with pytest.raises(Exception, match=r"model\.layers\.3\.eh_proj.* belongs to no parameter"):
        running.load(write_huggingface(CASES[NAME], wrong, tmp_path))


def test_block_float8_checkpoint_equals_its_dequantized_weights(tmp_path):
    """V3 is published with a scale for each block of 128 x 128 numbers, in all matrices of the
    layers except the router's. Rows are split (`kv_b_proj`) and reordered (RoPE) after that."""
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, values in tensors().items():
        plain[name] = stored[name] = values
        if "_proj" in name:
            scale = np.float32(np.abs(values).max() / 448)
            stored[name] = (values / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = np.full((1, 1), scale, np.float32)
            plain[name] = stored[name].astype(np.float32) * scale
    case = CASES[NAME]
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization |= {"weight_block_size": [128, 128]}
    config = {**case.config, "quantization_config": quantization}
    in_blocks = dataclasses.replace(case, config=config)
    _, weights = running.load(write_huggingface(in_blocks, stored, tmp_path / "blocks"))
    _, expected = running.load(write_huggingface(case, plain, tmp_path / "plain"))
    for one, other in zip(weights, expected, strict=True):
        assert np.allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-7)
