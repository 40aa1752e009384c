"""Grouped products: every backend compared with the formula, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.grouped_matmul import BACKENDS, api, gpu, grouped_matmul, tpu, xla
from jaxinfer.kernels.grouped_matmul.tpu_weights import rows_for
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize, quantize
from jaxinfer.kernels.triton_launch import interpret
from tests.support.gated_cases import (
    EMULATOR,
    QUANTIZED,
    TOLERANCE,
    assert_close,
    each_backend,
    programs,
)
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance


def _emulated_tpu(x, weights, group_sizes):
    """Use small tiles, so that small arrays have several."""
    tiling = tpu.TpuGroupedTiling(16, rows_for(weights, 128), 128)
    return tpu.grouped_matmul(x, weights, group_sizes, interpret=EMULATOR, tiling=tiling)


EMULATED = {"tpu": _emulated_tpu, "gpu": partial(gpu.grouped_matmul, launch=interpret)}
every_backend = each_backend(BACKENDS)
_well, _unoptimized = programs(grouped_matmul)


def run(x, weights, sizes, backend=None) -> np.ndarray:
    program = _unoptimized if backend in EMULATED else _well
    with mock.patch.dict(BACKENDS, EMULATED):
        return np.asarray(program(x, weights, np.asarray(sizes, np.int32), backend=backend))


def arrays(T: int, E: int, D: int, F: int, dtype: Any = "float32", seed: int = 0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))
    return normal(T, D), normal(E, D, F)


def oracle(x, weights, sizes) -> np.ndarray:
    """Compute the formula literally, one group after the other."""
    out, first = np.zeros((x.shape[0], weights.shape[2])), 0
    for e, size in enumerate(sizes):
        rows = slice(first, first + size)
        out[rows] = x[rows].astype(np.float64) @ weights[e].astype(np.float64)
        first += size
    return out


def check(x, weights, sizes, backend, tolerance: float) -> None:
    """Check a backend; rows of no group are NaN, and their results are zeros."""
    total = sum(sizes)
    x = x.copy()
    x[total:] = np.nan
    out = run(x, weights, sizes, backend)
    assert out.dtype == x.dtype
    assert (out[total:] == 0).all(), "rows of no group"
    if isinstance(weights, QuantArray):
        weights = np.asarray(dequantize(weights))
    if total:
        assert_close(out[:total], oracle(x, weights, sizes)[:total], tolerance)


# Sizes of 5 groups, of 40 rows in all.
SIZES = {
    "even": [8, 8, 8, 8, 8],
    "ragged": [1, 17, 3, 0, 19],
    "some rows of no group": [4, 0, 9, 2, 6],
    "one group has all": [0, 0, 40, 0, 0],
    "the first alone": [16, 0, 0, 0, 0],
    "the last alone": [0, 0, 0, 0, 31],
    "nothing at all": [0, 0, 0, 0, 0],
    "around a tile": [15, 1, 16, 0, 1],
    "one row each": [1, 1, 1, 1, 1],
}


@every_backend
def test_group_sizes_match_the_formula(backend):
    x, weights = arrays(40, 5, 24, 20)
    for sizes in SIZES.values():
        check(x, weights, sizes, backend, 1e-5)


# Rows, groups, D and F on both sides of tiles, and multiples of nothing.
SHAPES = [(1, 1, 16, 16), (2, 3, 128, 128), (37, 4, 37, 41), (70, 2, 256, 130), (9, 33, 40, 24)]


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(("T", "E", "D", "F"), SHAPES)
def test_shapes_around_tiles_match_the_formula(backend, T, E, D, F):
    x, weights = arrays(T, E, D, F)
    rng = np.random.default_rng(1)
    sizes = np.bincount(rng.integers(0, E, T - T // 8), minlength=E).tolist()
    check(x, weights, sizes, backend, 1e-5)


@every_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_match_within_their_precision(backend, dtype):
    x, weights = arrays(20, 3, 160, 96, dtype)
    check(x, weights, [7, 0, 12], backend, TOLERANCE[dtype])


@pytest.mark.matrix(by=("backend", "scheme"))
@every_backend
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_weights_match_their_dequantized_values(backend, scheme):
    x, weights = arrays(18, 3, 512, 24)
    weights = quantize(weights, **QUANTIZED[scheme])
    check(x.astype(ml_dtypes.bfloat16), weights, [9, 0, 8], backend, 1e-2)


@every_backend
def test_quantized_weights_are_exact_in_float32(backend):
    x, weights = arrays(18, 3, 256, 24)
    weights = quantize(weights, bits=4, group_size=32, has_zeros=True)
    check(x, weights, [3, 15, 0], backend, 1e-5)


@every_backend
@settings(deadline=None, max_examples=8)
@given(sizes=st.lists(st.integers(0, 12), min_size=4, max_size=4), seed=st.integers(0, 99))
def test_any_group_sizes_match_the_formula(backend, sizes, seed):
    x, weights = arrays(48, 4, 16, 8, seed=seed)
    check(x, weights, sizes, backend, 1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("tile", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_xla_loop_matches_the_formula_for_any_tile(tile, sizes):
    x, weights = arrays(40, 5, 12, 8)
    out = np.asarray(xla.grouped_matmul(x, weights, jnp.asarray(sizes), tile=tile))
    total = sum(sizes)
    assert not out[total:].any()
    assert np.allclose(out, oracle(x, weights, sizes), atol=1e-4)


@pytest.mark.parametrize("backend", ["xla", "tpu", pytest.param("gpu", marks=needs_triton)])
def test_empty_groups_are_not_read(backend):
    x, weights = arrays(12, 4, 16, 8)
    weights[[0, 2]] = np.nan
    assert np.isfinite(run(x, weights, [0, 7, 0, 3], backend)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": (8, 4)}, r"weights have 2 axes; they must have 3: \(E, D, F\)"),
        ({"weights": (3, 6, 4)}, "x has 8 columns, each matrix of the weights 6 rows"),
        ({"group_sizes": (2,)}, r"group_sizes has shape \(2,\); it must be \(3,\)"),
        ({"x": (0, 8)}, "there are 0 rows and 3 groups"),
        ({"weights": (0, 8, 4), "group_sizes": (0,)}, "there are 5 rows and 0 groups"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    given = {"x": (5, 8), "weights": (3, 8, 4), "group_sizes": (3,)} | change
    with pytest.raises(ValueError, match=message):
        api._check(**{name: jax.ShapeDtypeStruct(s, np.float32) for name, s in given.items()})


def test_kernels_decline_float8_weights():
    x, weights = arrays(3, 2, 64, 8)
    weights = quantize(weights, 8, is_float=True)
    check(x, weights, [1, 2], None, 1e-5)
    arguments = jax.tree.map(jnp.asarray, (x, weights, np.array([1, 2], np.int32)))
    with pytest.raises(NoBackendError, match="tpu: float8 weights are not read here"):
        grouped_matmul(*arguments, backend="tpu")
