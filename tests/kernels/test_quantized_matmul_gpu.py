"""The GPU kernel of products with quantized weights: tilings, splits, chips without float8,
refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.quantized_matmul import gpu, quantize
from jaxinfer.kernels.quantized_matmul.gpu import GpuQuantizedTiling
from jaxinfer.kernels.triton_launch import Recorder, interpret
from tests.support.quantized_cases import EMULATED, check, make_case, program_of
from tests.support.triton_bench import needs_triton

pytestmark = [pytest.mark.conformance, needs_triton]

FEW = GpuQuantizedTiling(16, 32, 32)
MANY = GpuQuantizedTiling(128, 32, 32, band=2)  # scales weights before the product


@pytest.fixture
def tile(monkeypatch):
    """Set the tiling of the tests' GPU backend."""

    def choose(tiling: GpuQuantizedTiling) -> None:
        program_of("gpu").clear_cache()
        backend = partial(gpu.quantized_matmul, launch=interpret, tiling=tiling)
        monkeypatch.setitem(EMULATED, "gpu", backend)

    yield choose
    program_of("gpu").clear_cache()


@pytest.mark.matrix(by="weights")
@pytest.mark.parametrize("tiling", [FEW, MANY], ids=str)
@pytest.mark.parametrize("weights", ["int8 zeros", "int4", "int4 zeros", "float8"])
def test_tilings_match_the_formula(tile, tiling, weights):
    tile(tiling)
    check(make_case(weights, T=20, D=256, F=40, group_size=64), "gpu")


def test_bands_cover_all_tokens_and_columns(tile):
    tile(GpuQuantizedTiling(16, 16, 32, band=2))
    check(make_case("int8", T=70, D=64, F=50), "gpu")


@pytest.mark.matrix
@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("weights", ["int8 zeros", "int4 zeros"])
@pytest.mark.parametrize("group_size", [None, 32])
def test_splits_cover_all_rows(tile, splits, weights, group_size):
    """Seven splits leave some without rows."""
    tile(GpuQuantizedTiling(16, 32, 32, splits=splits))
    check(make_case(weights, T=3, D=320, F=40, group_size=group_size), "gpu")


def test_splits_match_with_quantized_activations(tile):
    tile(GpuQuantizedTiling(16, 32, 32, splits=3))
    check(make_case("int8", T=3, D=320, F=40, x_dtype="int8"), "gpu", out_dtype="bfloat16")


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float8_e4m3fn"])
def test_float8_is_passed_as_bytes_where_unsupported(kind, x_dtype):
    launch = _recorded(kind, x_dtype, {"bits": 8, "is_float": True})
    is_native = "H100" in kind and x_dtype == "float8_e4m3fn"
    assert launch.constexprs["IS_FLOAT8"] is not is_native
    x, values = launch.inputs[:2]
    assert x.dtype == (x_dtype if is_native else "bfloat16")
    assert values.dtype == ("float8_e4m3fn" if is_native else "uint8")


def test_float8_as_bytes_matches_the_formula(monkeypatch):
    monkeypatch.setattr(gpu, "_multiplies_float8", lambda: False)
    program_of("gpu").clear_cache()
    check(make_case("float8", group_size=32, x_dtype="float8_e4m3fn"), "gpu")
    program_of("gpu").clear_cache()


@pytest.mark.parametrize(
    ("x_dtype", "weights", "scaling"),
    [
        ("bfloat16", {"bits": 8}, "end"),
        ("bfloat16", {"bits": 4, "group_size": 128}, "weights"),
        ("float16", {"bits": 4, "group_size": 128}, "sums"),
        ("int8", {"bits": 4, "group_size": 128}, "sums"),
    ],
)
def test_scale_placement_follows_the_tiling(x_dtype, weights, scaling):
    launch = _recorded("NVIDIA H100 80GB HBM3", x_dtype, weights, T=512)
    assert launch.constexprs["SCALING"] == scaling


def test_few_tokens_are_split_to_fill_the_chip():
    few = _recorded("NVIDIA H100 80GB HBM3", "bfloat16", {"bits": 8}, T=1)
    many = _recorded("NVIDIA H100 80GB HBM3", "bfloat16", {"bits": 8}, T=512)
    assert few.grid[0] * few.grid[1] >= 200 and few.outputs[0].shape == (few.grid[1], 1, 4096)
    assert many.grid[1] == 1 and many.outputs[0].shape == (512, 4096)


def test_candidates_include_the_heuristic():
    weight = jax.eval_shape(
        lambda w: quantize(w, 8), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    )
    for T in (1, 64, 2048):
        x = jax.ShapeDtypeStruct((T, 4096), jnp.bfloat16)
        tilings = gpu.candidates(x, weight, activation_dtype="int8")
        assert gpu.heuristic(x, weight) in tilings
        assert gpu.tiling_key(x, weight) == f"T={T} D=4096 F=4096 int8/4096 bfloat16"


@pytest.mark.parametrize(
    ("x_dtype", "weights", "reason"),
    [
        ("bfloat16", {"bits": 8, "group_size": 8}, "tiles of 8; a product of bfloat16 takes 16"),
        ("int8", {"bits": 4, "group_size": 16}, "tiles of 16; a product of int8 takes 32"),
    ],
)
def test_short_groups_are_declined(x_dtype, weights, reason):
    with pytest.raises(NotImplementedError, match=reason):
        _recorded("NVIDIA H100 80GB HBM3", x_dtype, weights)


@pytest.mark.parametrize("fields", [(8, 128, 64), (16, 100, 64), (16, 128, 64, 0)])
def test_invalid_tilings_are_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        GpuQuantizedTiling(*fields)


def _recorded(kind: str, x_dtype: str, weights: dict[str, Any], T: int = 16) -> Any:
    """Return the launch of a call [T, 4096] @ [4096, 4096] for a GPU."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    weight = jax.eval_shape(
        lambda w: quantize(w, **weights), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    )
    x = jax.ShapeDtypeStruct((T, 4096), x_dtype)
    is_quantized = jnp.dtype(x_dtype).itemsize == 1
    x_scale = jax.ShapeDtypeStruct((T, 1), jnp.float32) if is_quantized else None
    recorder = Recorder()
    mesh = AbstractMesh((1,), ("device",), abstract_device=device)
    call = partial(gpu.quantized_matmul, out_dtype=jnp.dtype("bfloat16"), launch=recorder)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda x, w, s: call(x, w, x_scale=s), x, weight, x_scale)
    [launch] = recorder.launches
    return launch
