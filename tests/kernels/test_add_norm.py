"""Residual sum and norm: every backend compared with the formula in float64."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.add_norm import BACKENDS, add_layer_norm, add_rms_norm, gpu, tpu
from jaxinfer.kernels.triton_launch import interpret
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

# The TPU kernel runs in its emulator, the GPU kernel in Triton's interpreter.
EMULATED = {
    "tpu": partial(tpu.add_norm, interpret=pltpu.InterpretParams()),
    "gpu": partial(gpu.add_norm, launch=interpret),
}
every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=needs_triton if b == "gpu" else ()) for b in BACKENDS]
)
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
STATIC = ("eps", "quantize", "backend")

# Unoptimized, and with the roundings of the formula, which XLA may leave out.
_unoptimized = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
_rms = jax.jit(add_rms_norm, static_argnames=(*STATIC, "offset"), compiler_options=_unoptimized)
_layer = jax.jit(add_layer_norm, static_argnames=STATIC, compiler_options=_unoptimized)


@pytest.fixture(autouse=True, scope="module")
def emulate():
    with mock.patch.dict(BACKENDS, EMULATED):
        yield


def arrays(T: int, D: int, dtype: str = "float32", *, has_residual: bool = True) -> tuple[Any, ...]:
    """Return x with a mean, residual, weights about 1, bias."""
    rng = np.random.default_rng(T * D)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.dtype(dtype))
    weight = (1 + 0.1 * make(D)).astype(dtype)
    return 2 * make(T, D) + 1, make(T, D) if has_residual else None, weight, make(D)


def oracle(x, residual, weight, bias, *, eps: float, offset: float | None = 0.0) -> np.ndarray:
    """Compute a token at a time; `offset` None: LayerNorm. Only the sum is rounded."""
    total = np.asarray(x if residual is None else x + residual, np.float64)
    out = np.zeros(total.shape)
    weight = np.asarray(weight, np.float64)
    for t, token in enumerate(total):
        if offset is None:
            out[t] = (token - token.mean()) / np.sqrt(token.var() + eps) * weight
            out[t] += 0 if bias is None else np.asarray(bias, np.float64)
        else:
            out[t] = token / np.sqrt((token**2).mean() + eps) * (offset + weight)
    return out


def assert_close(out: Any, ref: np.ndarray, tolerance: float) -> None:
    """Compare token by token."""
    out = np.asarray(out, np.float64)
    assert out.shape == ref.shape and np.isfinite(out).all()
    error = np.linalg.norm(out - ref, axis=-1) / np.linalg.norm(ref, axis=-1)
    assert error.max() <= tolerance, f"relative error {error.max():.2e}"


SIZES = [(1, 64), (70, 130), (3, 4096)]


@pytest.mark.matrix(by=("backend", "norm", "dtype"))
@every_backend
@pytest.mark.parametrize(("T", "D"), SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", ["rms", "gemma", "layer"])
def test_norms_match_the_formula(backend, T, D, dtype, norm):
    x, residual, weight, bias = arrays(T, D, dtype)
    if norm == "layer":
        out, total = _layer(x, residual, weight, bias, eps=1e-5, backend=backend)
        ref = oracle(x, residual, weight, bias, eps=1e-5, offset=None)
    else:
        offset = {"rms": 0.0, "gemma": 1.0}[norm]
        out, total = _rms(x, residual, weight, eps=1e-5, offset=offset, backend=backend)
        ref = oracle(x, residual, weight, None, eps=1e-5, offset=offset)
    assert out.dtype == total.dtype == x.dtype
    assert_close(out, ref, TOLERANCE[dtype])
    assert jnp.array_equal(total, x + residual), "the sum is rounded once"


@every_backend
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_sum_is_x_without_a_residual(backend, norm):
    x, _, weight, bias = arrays(9, 96, has_residual=False)
    if norm == "layer":
        out, total = _layer(x, None, weight, None, eps=1e-6, backend=backend)
        assert_close(out, oracle(x, None, weight, None, eps=1e-6, offset=None), 1e-6)
        out, total = _layer(x, None, weight, bias, eps=1e-6, backend=backend)
        assert_close(out, oracle(x, None, weight, bias, eps=1e-6, offset=None), 1e-6)
    else:
        out, total = _rms(x, None, weight, eps=1e-6, backend=backend)
        assert_close(out, oracle(x, None, weight, None, eps=1e-6), 1e-6)
    assert jnp.array_equal(total, x)


@pytest.mark.matrix(by=("backend", "quantize"))
@every_backend
@pytest.mark.parametrize("quantize", LARGEST)
@pytest.mark.parametrize(("T", "D"), [(1, 64), (37, 160), (3, 4096)])
def test_quantized_norm_matches_within_its_precision(backend, quantize, T, D):
    x, residual, weight, bias = arrays(T, D)
    exact = oracle(x, residual, weight, None, eps=1e-5)
    (values, scales), total = _rms(
        x, residual, weight, eps=1e-5, quantize=quantize, backend=backend
    )
    assert values.dtype == quantize and scales.shape == (T, 1) and scales.dtype == jnp.float32
    assert np.allclose(scales[:, 0], np.abs(exact).max(1) / LARGEST[quantize], rtol=1e-5)
    assert_close(values.astype(jnp.float32) * scales, exact, {"int8": 1.5e-2}.get(quantize, 4e-2))
    assert jnp.array_equal(total, x + residual)
    if quantize == "int8":  # to nearest, so within half a step
        steps = np.asarray(values, np.float64) - exact / np.asarray(scales, np.float64)
        assert np.abs(steps).max() <= 0.501
    (values, scales), _ = _layer(
        x, None, weight, bias, eps=1e-5, quantize=quantize, backend=backend
    )
    exact = oracle(x, None, weight, bias, eps=1e-5, offset=None)
    assert_close(values.astype(jnp.float32) * scales, exact, {"int8": 1.5e-2}.get(quantize, 4e-2))


@every_backend
def test_backends_quantize_bfloat16_equally(backend):
    """They differ by one step at most, where a norm fell on the other side of a rounding."""
    x, residual, weight, _ = arrays(16, 128, "bfloat16")
    make = partial(_rms, x, residual, weight, eps=1e-5, quantize="int8")
    (values, scales), _ = make(backend=backend)
    (ref, ref_scales), _ = make(backend="reference")
    steps = np.abs(np.asarray(values, np.int32) - np.asarray(ref, np.int32))
    assert steps.max() <= 1 and (steps > 0).mean() < 0.02
    assert np.allclose(scales, ref_scales, rtol=1e-2)


@every_backend
@pytest.mark.parametrize("quantize", LARGEST)
def test_zero_tokens_have_scale_one(backend, quantize):
    x, _, weight, _ = arrays(4, 64)
    x = x.at[1].set(0)
    (values, scales), _ = _rms(x, None, weight, eps=1e-5, quantize=quantize, backend=backend)
    assert scales[1, 0] == 1 and not values[1].astype(jnp.float32).any()
    assert (scales[jnp.array([0, 2, 3]), 0] < 1).all()


@every_backend
def test_nan_token_does_not_affect_others(backend):
    x, residual, weight, _ = arrays(70, 96)
    bad = jnp.asarray([3, 69])
    poisoned = x.at[bad].set(jnp.nan)
    out, _ = _rms(poisoned, residual, weight, eps=1e-5, backend=backend)
    clean, _ = _rms(x, residual, weight, eps=1e-5, backend=backend)
    others = np.setdiff1d(np.arange(70), bad)
    assert jnp.isnan(out[bad]).all() and jnp.array_equal(out[others], clean[others])


@every_backend
def test_large_and_small_numbers_match_the_formula(backend):
    x, _, weight, _ = arrays(4, 64)
    for size in (1e-12, 1e15):
        out, _ = _rms(size * x, None, weight, eps=1e-30, backend=backend)
        assert_close(out, oracle(x, None, weight, None, eps=0), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_norm_equals_plain_jax_bit_for_bit(dtype):
    from flax import nnx

    from jaxinfer.nn.layers import Numerics, RMSNorm

    x, residual, weight, _ = arrays(24, 576, dtype)
    layer = RMSNorm(576, 1e-5, Numerics(np.dtype(jnp.dtype(dtype))))
    layer.weight = nnx.Param(weight)
    jitted: Any = jax.jit(lambda x: layer(x))
    normed, _ = jax.jit(lambda x: add_rms_norm(x, None, weight, eps=1e-5, backend="xla"))(x)
    assert jnp.array_equal(normed, jitted(x))
    both: Any = jax.jit(lambda x, r: (layer(x + r), x + r))
    fused: Any = jax.jit(lambda x, r: add_rms_norm(x, r, weight, eps=1e-5, backend="xla"))
    for one, other in zip(fused(x, residual), both(x, residual), strict=True):
        assert jnp.array_equal(one, other)


def test_arguments_that_do_not_fit_are_refused():
    x, residual, weight, bias = arrays(4, 64)
    with pytest.raises(ValueError, match=r"residual is bfloat16 \(4, 64\); x is float32"):
        add_rms_norm(x, residual.astype(jnp.bfloat16), weight, eps=1e-5)
    with pytest.raises(ValueError, match="eps is -1"):
        add_rms_norm(x, residual, weight, eps=-1.0)
    with pytest.raises(ValueError, match=r"quantize is 'int4'; it must be None or one of \['int8'"):
        add_layer_norm(x, residual, weight, bias, eps=1e-5, quantize="int4")
