"""Pages that are split by offset: merged attention over the parts equals that over whole pages."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.flash_attention import merge
from jaxinfer.kernels.folding import rows_and_lanes
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention import BACKENDS, AttentionVariant, paged_attention
from jaxinfer.kernels.paged_attention.page_part import PagePart
from tests.support.attention_cases import (
    EMULATED,
    TOLERANCE,
    Case,
    Shape,
    assert_close,
    make_case,
    oracle,
    variant_of,
)
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

MIXED = [(1, 33), (1, 1), (7, 40), (0, 0), (1, 16), (20, 20), (1, 100), (3, 17)]
# At most the number of tokens that are cached before the step.
LIMITS = np.array([32, 0, 33, 0, 15, 0, 64, 14], np.int32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SCALE = 0.25
PLAIN = AttentionVariant(SCALE)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 21},
    "limit": {"key_limit": LIMITS},
    "all": {"window": 21, "soft_cap": 2.0, "alibi_slopes": SLOPES, "key_limit": LIMITS},
}


@partial(
    jax.jit,
    static_argnames=("count", "backend"),
    compiler_options={"xla_backend_optimization_level": 0},  # each program runs only once
)
def _merged(q, rows, pages, variant, *, count, backend):
    """Compute attention over each part of the pages, and merge the results."""
    B = pages.k.shape[2] // count
    shape = (1, *q.shape[:2])
    value_dim = variant.value_dim or q.shape[2]
    empty = jnp.zeros((*shape, value_dim)), jnp.full(shape, -jnp.inf)

    def body(index, total):
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, index * B, B, 2)
        found: Any = paged_attention(
            q, rows, jax.tree.map(cut, pages), variant,
            part=PagePart(index, count), return_lse=True, backend=backend,
        )  # fmt: skip
        return merge(total[0], total[1], found[0][None].astype(jnp.float32), found[1][None])

    out, lse = jax.lax.fori_loop(0, count, body, empty)
    return out[0], lse[0]


def check(case: Case, count: int, backend: str, **variant: Any) -> None:
    q, rows, pages = case.arrays()
    limit = variant.get("key_limit")
    rows = rows._replace(key_limit=None if limit is None else jnp.asarray(limit))
    traced = variant_of({"scale": SCALE, **variant})
    with mock.patch.dict(BACKENDS, EMULATED):
        found = _merged(q, rows, pages, traced, count=count, backend=backend)
        out, lse = map(np.asarray, found)
    ref, ref_lse = oracle(case, scale=SCALE, return_lse=True, **variant)
    real = slice(case.num_real)
    tolerance = TOLERANCE[case.q.dtype.name]
    assert_close(out[real], ref[real], tolerance)
    assert (np.isfinite(ref_lse) == np.isfinite(lse)).all(), "lse"
    finite = np.isfinite(ref_lse)
    assert np.allclose(lse[finite], ref_lse[finite], rtol=10 * tolerance, atol=10 * tolerance)
    assert (out[case.num_real :] == 0).all(), "padding"


@pytest.mark.parametrize(
    ("backend", "variant"), [("reference", "all"), *(("xla", name) for name in VARIANTS)]
)
def test_merged_parts_equal_whole_pages(backend, variant):
    check(make_case(MIXED), 4, backend, **VARIANTS[variant])


@pytest.mark.parametrize("count", [2, 16])
def test_merged_parts_of_any_size_equal_whole_pages(count):
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=8)
    check(make_case(MIXED, shape), count, "xla", window=5)
    long = dataclasses.replace(shape, num_tokens=300, num_rows=2, table_width=40)
    check(make_case([(150, 400), (129, 129)], long), count, "xla")


@pytest.mark.parametrize(("dtype", "cache_dtype"), [("float32", "int8"), ("bfloat16", "bfloat16")])
def test_merged_parts_of_narrow_and_quantized_pages_equal_whole_pages(dtype, cache_dtype):
    case = make_case(MIXED, Shape(dtype=dtype, cache_dtype=cache_dtype))
    check(case, 4, "xla", key_limit=LIMITS)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_merged_parts_of_latent_pages_equal_whole_pages(backend):
    case = make_case(MIXED, Shape(num_kv_heads=1, head_dim=20))
    q, rows, pages = case.arrays()
    rows, pages = rows._replace(key_limit=jnp.asarray(LIMITS)), KVPages(pages.k, None)
    variant = AttentionVariant(SCALE, value_dim=12)
    out, _ = _merged(q, rows, pages, variant, count=4, backend=backend)
    doubled = dataclasses.replace(case, v_pages=case.k_pages)
    ref = oracle(doubled, scale=SCALE, key_limit=LIMITS)[..., :12]
    assert_close(np.asarray(out)[: case.num_real], ref[: case.num_real], 1e-5)


@pytest.mark.parametrize("backend", ["tpu", pytest.param("gpu", marks=needs_triton)])
@pytest.mark.parametrize("variant", ["plain", "limit"])
def test_kernels_of_whole_pages_compute_parts_with_one_row_per_token(backend, variant):
    """The batch has decodes and a chunk of a few tokens, some of which see no key in a part."""
    shape = Shape(num_tokens=12, num_rows=4, num_heads=2, num_kv_heads=1)
    case = make_case([(1, 33), (1, 1), (6, 40), (2, 2)], shape)
    limits = {"key_limit": LIMITS[:4]} if variant == "limit" else {}
    check(case, 2, backend, **limits)


def test_part_of_a_folded_page_is_a_folded_page():
    """Each device folds its own part of a page."""
    case = make_case(MIXED, Shape(head_dim=64))
    q, rows, pages = case.arrays()
    rows_of_part, lanes = rows_and_lanes(8, 64)
    fold = lambda x: x.reshape(*x.shape[:2], -1, lanes)
    parts = [jax.tree.map(lambda x, r=r: fold(x[:, :, 8 * r : 8 * r + 8]), pages) for r in (0, 1)]
    assert parts[0].k.shape[2:] == (rows_of_part, lanes) == (4, 128)
    joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts)
    out, _ = _merged(q, rows, joined, PLAIN, count=2, backend="xla")
    ref = oracle(case, scale=SCALE)
    assert_close(np.asarray(out)[: case.num_real], ref[: case.num_real], 1e-5)


@pytest.mark.parametrize("backend", ["tpu", "gpu", "hopper"])
def test_kernel_that_needs_whole_pages_refuses_parts(backend):
    case = make_case(MIXED)
    declined = pytest.raises(NoBackendError, match="pages that are split over devices")
    with declined:
        windowed = AttentionVariant(SCALE, window=4)
        _merged(*case.arrays(), windowed, count=2, backend=backend)
    long = make_case([(300, 300)], Shape(num_tokens=300, num_rows=1, table_width=19))
    with declined:
        _merged(*long.arrays(), PLAIN, count=2, backend=backend)
