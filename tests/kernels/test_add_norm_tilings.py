"""Tilings of the residual sum and norm: results do not depend on them; limits of the chips."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.add_norm import add_rms_norm, gpu, tpu
from jaxinfer.kernels.add_norm.options import NormOptions
from jaxinfer.kernels.triton_launch import Recorder, interpret
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

OPTIONS = NormOptions(1e-5, 0.0, is_centred=False, quantize=None)


def arrays(T: int, D: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return make(T, D), make(T, D), make(D), None


def assert_same(out, x, residual, weight) -> None:
    ref, total = add_rms_norm(x, residual, weight, eps=1e-5, backend="reference")
    assert np.allclose(out[0], ref, rtol=1e-5, atol=1e-6)
    assert np.array_equal(out[1], total)


@pytest.mark.parametrize("rows", [32, 64, 96])
def test_tpu_result_does_not_depend_on_the_block(rows):
    x, residual, weight, bias = arrays(100, 136)
    backend = partial(
        tpu.add_norm, tiling=tpu.TpuNormTiling(rows), interpret=pltpu.InterpretParams()
    )
    out = jax.jit(partial(backend, options=OPTIONS))(x, residual, weight, bias)
    assert_same(out, x, residual, weight)


@needs_triton
@pytest.mark.parametrize("tiling", [gpu.GpuNormTiling(1, 1), gpu.GpuNormTiling(8, 4)], ids=str)
def test_gpu_result_does_not_depend_on_the_block(tiling):
    x, residual, weight, bias = arrays(13, 136)
    out = gpu.add_norm(x, residual, weight, bias, OPTIONS, tiling=tiling, launch=interpret)
    assert_same(out, x, residual, weight)


@pytest.mark.parametrize("D", [64, 768, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("T", [1, 64, 2048])
def test_heuristics_are_candidates_and_fit(T, D):
    x = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    assert gpu.heuristic(x) == gpu.candidates(x, x, x)[0]
    assert tpu.heuristic(x) == tpu.candidates(x, x, x)[0]
    assert all(tpu.vmem_bytes(tiling, x) <= tpu.MAX_VMEM for tiling in tpu.candidates(x, x, x))
    assert gpu.tiling_key(x) == f"T={T} D={D} bfloat16 None" == tpu.tiling_key(x, quantize=None)


def test_invalid_tilings_are_refused():
    with pytest.raises(ValueError, match="rows is 3; it must be a power of two"):
        gpu.GpuNormTiling(3, 4)
    with pytest.raises(ValueError, match="rows is 16; it must be a multiple of 32"):
        tpu.TpuNormTiling(16)


def test_tpu_declines_with_the_reason():
    wide = jax.ShapeDtypeStruct((64, 20000), jnp.bfloat16)
    of_model = jax.ShapeDtypeStruct((20000,), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"a block of 32 tokens takes 14\.6 MiB"):
        tpu.add_norm(wide, wide, of_model, None, OPTIONS)
    half = jax.ShapeDtypeStruct((64, 128), jnp.float16)
    with pytest.raises(NotImplementedError, match="Mosaic loads no float16"):
        tpu.add_norm(half, half, half, None, OPTIONS)


@needs_triton
def test_gpu_declines_long_tokens_and_missing_float8():
    wide = jax.ShapeDtypeStruct((64, 20000), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="a token has 20000 numbers; registers hold"):
        gpu.add_norm(wide, wide, wide, None, OPTIONS, launch=Recorder())
    a100 = jax.sharding.AbstractDevice(
        device_kind="NVIDIA A100-SXM4-40GB", num_cores=108, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=a100)
    x, residual, weight, bias = arrays(4, 64)
    options = OPTIONS._replace(quantize="float8_e4m3fn")
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match="sm_80"):
        gpu.add_norm(x, residual, weight, bias, options, launch=Recorder())
