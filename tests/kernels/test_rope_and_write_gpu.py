"""The GPU kernel of the cache write: tilings, one launch, refusals."""

from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.kernels.rope_and_write import BACKENDS, gpu
from jaxinfer.kernels.rope_and_write.gpu import GpuRopeTiling
from jaxinfer.kernels.triton_launch import Recorder, interpret
from tests.kernels.test_rope_and_write import Shape, check, make_case
from tests.support.triton_bench import needs_triton

pytestmark = [pytest.mark.conformance, needs_triton]

ROWS = [(3, 5, 1), (9, 0, 1), (5, 0, 6)]


@pytest.mark.parametrize(
    "tiling", [GpuRopeTiling(1, 1), GpuRopeTiling(2, 2), GpuRopeTiling(8, 4)], ids=str
)
def test_tilings_match_the_formula(tiling):
    shape = Shape(num_heads=6, num_kv_heads=3, half=12, cache_dtype="int8")
    backend = partial(gpu.rope_and_write, launch=interpret, tiling=tiling)
    jax.clear_caches()
    with mock.patch.dict(BACKENDS, {"gpu": backend}):
        check(make_case(shape, ROWS, num_tokens=8), "gpu")
    jax.clear_caches()


@pytest.mark.parametrize("half", [None, 16])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_one_launch_writes_the_pages_in_place(half, cache_dtype):
    recorder = Recorder()
    case = make_case(Shape(half=half, cache_dtype=cache_dtype), ROWS, num_tokens=8)
    jax.eval_shape(partial(gpu.rope_and_write, launch=recorder), *case)
    (launch,) = recorder.launches
    assert len(launch.aliases) == (4 if cache_dtype == "int8" else 2)
    for source, target in launch.aliases.items():
        given, made = launch.inputs[source], launch.outputs[target]
        assert (given.shape, given.dtype) == (made.shape, made.dtype)
    programs_of_queries = launch.grid[1] - 2 * launch.constexprs["plan"].kv_blocks
    assert bool(programs_of_queries) == (half is not None)


def test_candidates_include_the_heuristic():
    q, new, *rest = make_case(Shape(num_heads=32, num_kv_heads=8, head_dim=128, half=64), ROWS)
    assert gpu.heuristic(q, new.k) in gpu.candidates(q, new, *rest)
    assert gpu.tiling_key(q, new, *rest) == "T=64 N=32 K=8 H=128 float32 float32"
    with pytest.raises(ValueError, match="heads is 3; it must be a power of two"):
        GpuRopeTiling(3, 4)


def test_folded_pages_are_declined():
    case = make_case(Shape(head_dim=64, page_size=64, is_folded=True), ROWS)
    with pytest.raises(NotImplementedError, match="pages are folded"):
        gpu.rope_and_write(*case, launch=interpret)


def test_float8_is_declined_on_gpus_without_it():
    case = make_case(Shape(dtype="bfloat16", cache_dtype="float8_e4m3fn"), ROWS)
    a100 = jax.sharding.AbstractDevice(
        device_kind="NVIDIA A100-SXM4-40GB", num_cores=108, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=a100)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match="sm_80"):
        gpu.rope_and_write(*case, launch=Recorder())
    jax.eval_shape(partial(gpu.rope_and_write, launch=Recorder()), *case)
    assert jnp.dtype(case[3].k.dtype) == jnp.float8_e4m3fn
