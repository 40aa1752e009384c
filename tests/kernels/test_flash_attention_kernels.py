"""The kernels of flash attention: races, tilings, translation of mods to Triton."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.flash_attention import (
    AttentionMask,
    AttentionVariant,
    block_mask,
    flash_attention,
    gpu,
    tpu,
)
from jaxinfer.kernels.flash_attention.rule import tiling_key
from jaxinfer.kernels.triton_launch import interpret
from tests.support.flash_cases import SMALL, Shape, check, make_case, name_of, program
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

PLAIN = AttentionVariant(1.0)
SHAPE = Shape(1, 40, 300, 4, 2, 16)
SINKS = np.array([0.5, -1.0, 3.0, -8.0], np.float32)
VARIANT: dict[str, Any] = {"causal": True, "window": 150, "soft_cap": 2.5, "sinks": SINKS}


@pytest.fixture
def backend_of(monkeypatch):
    """Replace a backend of the tests by another function."""

    def choose(name: str, function: Any) -> None:
        program.clear_cache()
        monkeypatch.setitem(SMALL, name, function)

    yield choose
    program.clear_cache()


def test_fetches_do_not_race_with_arithmetic(backend_of):
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    tiling = tpu.TpuFlashTiling(16, 128)
    backend_of("tpu", partial(tpu.flash_attention, interpret=params, tiling=tiling))
    check(make_case(SHAPE), "tpu", **VARIANT)
    races: Any = emulator.races
    assert not races.races_found


@pytest.mark.parametrize(
    "tiling", [None, tpu.TpuFlashTiling(48, 256), tpu.TpuFlashTiling(16, 512)], ids=name_of
)
def test_tpu_tilings_match_the_formula(backend_of, tiling):
    params = pltpu.InterpretParams()
    backend_of("tpu", partial(tpu.flash_attention, interpret=params, tiling=tiling))
    check(make_case(SHAPE), "tpu", **VARIANT)


@needs_triton
@pytest.mark.parametrize(
    "tiling", [None, gpu.GpuFlashTiling(64, 16), gpu.GpuFlashTiling(16, 128)], ids=name_of
)
def test_gpu_tilings_match_the_formula(backend_of, tiling):
    backend_of("gpu", partial(gpu.flash_attention, launch=interpret, tiling=tiling))
    check(make_case(SHAPE), "gpu", **VARIANT)


def floats(score, row, head, q, k):
    """Use every operation on floats that the translation knows."""
    x = score * 0.5
    y = jnp.exp(-jnp.abs(x)) + jnp.exp2(-jnp.square(x)) + jnp.log(1.0 + x * x)
    y += jnp.sqrt(x * x) - jax.lax.rsqrt(1.0 + x**2) + jnp.sin(x) * jnp.cos(x) + jax.lax.erf(x)
    y += jnp.floor(3 * x) - jnp.ceil(2 * x) + jnp.tanh(x) - jax.nn.sigmoid(x) + jnp.sign(x)
    y += jnp.clip(x, -0.5, 0.25) + jnp.maximum(x, 0.1) - jnp.minimum(x, -0.1) + x**3
    return y + jax.nn.relu(x) - x % 0.75 + jnp.where(x < 0, x / 3, -1.0)


def integers(score, row, head, q, k):
    """Use operations on negative integers too, where a quotient's rounding shows."""
    d = q - k
    bits = ((d // 3) + (d % 5) + jax.lax.div(d, 4) - jax.lax.rem(d, 7)) ^ (k << 1)
    bits = (bits & ~(q >> 1)) | (jnp.abs(d) * (d > 2)) | jnp.where(head == 1, 3, 4)
    odd = jnp.logical_not(d % 2 == 0) ^ (row >= 0)
    return score + 0.01 * bits.astype(jnp.float32) + odd.astype(jnp.float32) - (d != 0)


def cornered(row, head, q, k):
    return ((q <= k) & ~(q == 5)) | (k > 12) | ((q < 3) != (k >= 10))


@needs_triton
@pytest.mark.parametrize("mods", [{"score_mod": floats}, {"score_mod": integers}], ids=name_of)
def test_mods_translate_to_triton(mods):
    check(make_case(Shape(1, 20, 20, 2, 1, 16)), "gpu", mask_mod=cornered, **mods)


REFUSED = [
    (lambda z, r, h, q, k: z + jnp.arcsin(z), "score_mod uses asin, which has no line in Triton"),
    (lambda z, r, h, q, k: jnp.array([1.0, 2.0])[q], "score_mod closes over arrays"),
    (lambda z, r, h, q, k: jnp.ones(3) * z, "not one number an element"),
    (lambda z, r, h, q, k: jnp.sum(jnp.stack([z, z])), "on a vector"),
    (lambda z, r, h, q, k: 1.0, "score_mod is the constant"),
]


@needs_triton
@pytest.mark.parametrize(("mod", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_untranslatable_mods_are_named_and_run_on_xla(mod, message):
    arrays = [jnp.ones((1, 4, 1, 16))] * 3
    trace = lambda backend: jax.eval_shape(
        partial(flash_attention, variant=PLAIN, score_mod=mod, backend=backend), *arrays
    )
    with pytest.raises(NoBackendError, match=message):
        trace("gpu")
    if "vector" in message or "constant" in message:  # allowed where there are whole arrays
        return
    with mock.patch.object(dispatch, "platform", return_value="gpu"):
        assert message.startswith("not one") or trace(None).shape == (1, 4, 1, 16)


@needs_triton
def test_unsupported_head_dim_is_declined():
    with pytest.raises(NoBackendError, match="head dim 48"):
        flash_attention(*[jnp.ones((1, 4, 1, 48))] * 3, variant=PLAIN, backend="gpu")


@pytest.mark.parametrize("module", [tpu, gpu])
def test_candidate_tilings_fit(module):
    q, k = (jax.ShapeDtypeStruct((1, 2048, n, 128), jnp.bfloat16) for n in (32, 8))
    found = module.candidates(q, k, k, PLAIN, AttentionMask(causal=True))
    assert found[0] == module.heuristic(q, k) and len(set(found)) == len(found) > 3

    def every(row, head, q, k):
        return q == q

    blocks = block_mask(every, 2048, 2048, q_block=128, k_block=256)
    mask = AttentionMask(mask_mod=every, block_mask=blocks)
    for tiling in module.candidates(q, k, k, PLAIN, mask):
        assert 128 % tiling.q_tile == 0 and 256 % tiling.k_tile == 0
    small = jax.ShapeDtypeStruct((1, 5, 2, 64), jnp.float32)
    assert module.heuristic(small, small).q_tile == 16
    mask = AttentionMask(causal=True, mask_mod=every, block_mask=blocks)
    key = tiling_key(q, k, k, AttentionVariant(1.0, window=9), mask)
    assert key == "T=2048 S=2048 N=32 K=8 H=128 bfloat16 mask_mod causal window=9 blocks=128x256"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tpu.TpuFlashTiling(17, 128), "q_tile 17 is no multiple of 16"),
        (lambda: tpu.TpuFlashTiling(16, 64), "k_tile 64 is no multiple of 128"),
        (lambda: gpu.GpuFlashTiling(24, 16), "q_tile is 24; it must be a power of two from 16 on"),
        (lambda: gpu.GpuFlashTiling(16, 8), "k_tile is 8"),
    ],
)
def test_invalid_tilings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
