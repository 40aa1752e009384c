"""Latents in the cache: pages without values give the same as separate keys and values, on every
backend."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.execution import kv_cache
from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.folding import fold_of, rows_and_lanes
from jaxinfer.kernels.kv_pages import KVPages, NewTokens, write
from jaxinfer.kernels.paged_attention import AttentionVariant, RaggedRows, paged_attention
from jaxinfer.kernels.paged_attention.update import update_and_attend
from jaxinfer.kernels.rope_and_write import rope_and_write, tpu
from jaxinfer.nn.latent_attention import LatentConfig
from jaxinfer.nn.ragged import CacheShape
from tests.support.attention_cases import (
    TOLERANCE,
    Case,
    Shape,
    assert_close,
    make_case,
    oracle,
    variant_of,
)

pytestmark = pytest.mark.conformance

every_backend = pytest.mark.parametrize("backend", ["reference", "xla"])
STATIC = ("return_lse", "batch_invariant", "backend")
_attend: Any = jax.jit(paged_attention, static_argnames=STATIC)
_step: Any = jax.jit(update_and_attend, static_argnames="backend")

SMALL = Shape(num_kv_heads=1, head_dim=20)  # of 4 query heads; the first 12 are the value
VALUE_DIM = 12
MIXED = [(1, 33), (1, 1), (7, 40), (0, 0), (1, 16), (20, 20), (1, 100), (3, 17)]


def keys_alone(case: Case) -> tuple[Any, ...]:
    """Return the queries, rows and pages of a case, without the pages of values."""
    q, rows, pages = case.arrays()
    return q, rows, KVPages(pages.k, None, pages.k_scales)


def check(case: Case, backend: str, value_dim: int = VALUE_DIM, **variant: Any) -> None:
    """The backend agrees with the formula, whose values are the first numbers of the keys."""
    variant = {"scale": case.q.shape[2] ** -0.5, **variant}
    options = {"return_lse": True, "backend": backend, "value_dim": value_dim, **variant}
    of_score = variant_of(options)
    out, lse = map(np.asarray, _attend(*keys_alone(case), of_score, **options))
    assert out.dtype == case.q.dtype and out.shape == (*case.q.shape[:2], value_dim)
    assert (out[case.num_real :] == 0).all() and (lse[case.num_real :] == -np.inf).all()
    variant.pop("batch_invariant", None)
    doubled = dataclasses.replace(case, v_pages=case.k_pages, v_scales=case.k_scales)
    ref, ref_lse = oracle(doubled, return_lse=True, **variant)
    real, tolerance = slice(case.num_real), TOLERANCE[case.q.dtype.name]
    assert_close(out[real], ref[real][..., :value_dim], tolerance)
    assert np.allclose(lse[real], ref_lse[real], rtol=10 * tolerance, atol=10 * tolerance)


@every_backend
@pytest.mark.parametrize("variant", [{}, {"window": 17, "soft_cap": 2.0}])
def test_values_are_the_first_numbers_of_the_keys(backend, variant):
    check(make_case(MIXED, SMALL), backend, **variant)


@every_backend
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "value_dim", "page_size"),
    [(16, 576, 512, 16), (1, 24, 24, 8), (5, 9, 1, 1)],
)
def test_latent_sizes_match_the_formula(backend, num_heads, head_dim, value_dim, page_size):
    shape = Shape(16, 4, num_heads, 1, head_dim, page_size, 32, 80)
    check(make_case([(1, 20), (9, 30), (1, 3), (2, 2)], shape), backend, value_dim)


@every_backend
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("bfloat16", "bfloat16"), ("float32", "int8"), ("float32", "float8_e4m3fn")],
)
def test_narrow_and_quantized_latents_match_the_formula(backend, dtype, cache_dtype):
    shape = dataclasses.replace(SMALL, dtype=dtype, cache_dtype=cache_dtype)
    check(make_case(MIXED, shape), backend)


@every_backend
def test_folded_latents_equal_plain_ones(backend):
    rows, lanes = rows_and_lanes(SMALL.page_size, 96)  # one token a row of 128 lanes
    assert (rows, fold_of(lanes, 96)) == (16, 1)
    wide = dataclasses.replace(SMALL, head_dim=96)
    case = make_case(MIXED, wide)
    padded = np.pad(case.k_pages, [(0, 0)] * 3 + [(0, lanes - 96)])
    q, ragged, pages = keys_alone(case)
    variant = AttentionVariant(0.1, value_dim=80)
    plain = _attend(q, ragged, pages, variant, backend=backend)
    wide_pages = pages._replace(k=jnp.asarray(padded))
    folded = _attend(q, ragged, wide_pages, variant, backend=backend)
    assert np.array_equal(plain[: case.num_real], folded[: case.num_real])


@every_backend
def test_batch_invariant_results_do_not_depend_on_the_batch(backend):
    variant = AttentionVariant(0.25, value_dim=VALUE_DIM)
    options = {"batch_invariant": True, "backend": backend}
    case = make_case(MIXED, SMALL)
    out = np.asarray(_attend(*keys_alone(case), variant, **options))
    check(case, backend, batch_invariant=True)
    q, (q_start, kv_len, table, _), pages = keys_alone(case)
    first, end = int(q_start[5]), int(q_start[6])  # the row that is computed as a whole
    alone = _attend(
        jnp.full_like(q, jnp.nan).at[: end - first].set(q[first:end]),
        RaggedRows(
            jnp.minimum(jnp.arange(9) * (end - first), end - first),
            jnp.zeros_like(kv_len).at[0].set(kv_len[5]),
            jnp.roll(table, -5, axis=0),
        ),
        pages,
        variant,
        **options,
    )
    assert np.array_equal(out[first:end], alone[: end - first])


@pytest.mark.parametrize("backend", ["tpu", "gpu", "hopper"])
def test_kernels_decline_pages_without_values(backend):
    with pytest.raises(NoBackendError, match="values are a part of the keys"):
        variant = AttentionVariant(1.0, value_dim=VALUE_DIM)
        paged_attention(*keys_alone(make_case(MIXED, SMALL)), variant=variant, backend=backend)


@pytest.mark.parametrize(
    ("has_values", "value_dim", "message"),
    [
        (False, None, "value_dim is None, and the pages have no values"),
        (True, 12, "value_dim is 12, and the pages have values"),
        (False, 0, "value_dim is 0; keys of 20 take 1 to 20"),
        (False, 21, "value_dim is 21; keys of 20 take 1 to 20"),
    ],
)
def test_value_dim_must_fit_the_pages(has_values, value_dim, message):
    case = make_case(MIXED, SMALL)
    arguments: Any = case.arrays() if has_values else keys_alone(case)
    with pytest.raises(ValueError, match=message):
        paged_attention(*arguments, variant=AttentionVariant(1.0, value_dim=value_dim))


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
@every_backend
def test_step_stores_keys_and_attends(backend, cache_dtype):
    """Results equal those with values in their own pages, and no pages of values appear."""
    shape = dataclasses.replace(SMALL, cache_dtype=cache_dtype)
    q, rows, pages = make_case([(3, 9), (1, 30)], shape).arrays()
    table = rows.page_table
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(48, 1, 20)), jnp.float32)
    page = jnp.full(48, 64).at[:4].set(jnp.asarray([*[table[0, 0]] * 3, table[1, 1]]))
    offset = jnp.zeros(48, jnp.int32).at[:4].set(jnp.asarray([6, 7, 8, 13]))
    pages = pages._replace(k=jnp.nan_to_num(pages.k))
    latent = KVPages(pages.k, None, pages.k_scales)
    step, at = partial(_step, backend=backend), (page, offset)
    variant = AttentionVariant(0.3, value_dim=VALUE_DIM)
    out, stored = step(q, NewTokens(k, None, *at), rows, latent, variant)
    both = KVPages(pages.k, pages.k, pages.k_scales, pages.k_scales)
    expected, stored_both = step(q, NewTokens(k, k, *at), rows, both, AttentionVariant(0.3))
    assert np.allclose(out, expected[..., :VALUE_DIM], atol=1e-6)
    assert stored.v is None and stored.v_scales is None
    assert np.array_equal(stored.k, stored_both.k, equal_nan=True)


def test_values_that_do_not_fit_the_pages_are_refused():
    x, at = jnp.zeros((4, 1, 20)), jnp.zeros(4, jnp.int32)
    latent, new = KVPages(jnp.zeros((3, 1, 16, 20)), None), NewTokens(x, None, at, at)
    with pytest.raises(ValueError, match="values for pages without them"):
        rope_and_write(x, NewTokens(x, x, at, at), None, latent)
    both = latent._replace(v=latent.k)
    with pytest.raises(ValueError, match="no values for pages with them"):
        rope_and_write(x, new, None, both)
    with pytest.raises(NoBackendError, match="the pages have no values"):
        rope_and_write(x, new, None, latent, backend="gpu")


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_tpu_kernel_writes_latents_as_xla_does(cache_dtype):
    rng = np.random.default_rng(0)
    values = rng.integers(-9, 9, (6, 1, 32, 128)).astype(cache_dtype)
    values[..., 96:] = 0
    scales = jnp.ones((6, 1, 32)) if cache_dtype == "int8" else None
    pages = KVPages(jnp.asarray(values), None, scales)
    x = jnp.asarray(rng.normal(size=(7, 1, 96)), jnp.float32)
    page = jnp.array([3, 3, 3, 0, 5, 6, 2**31 - 1])  # the pool has 6
    new = NewTokens(x, None, page, jnp.array([30, 31, 0, 7, 8, 1, 2]))
    write_by = partial(tpu.rope_and_write, interpret=pltpu.InterpretParams())
    _, out = write_by(x, new, None, pages)
    expected: Any = write(pages, new)
    assert out.v is None and out.v_scales is None
    assert np.array_equal(out.k, expected.k)
    assert scales is None or (out.k_scales == expected.k_scales).all()


def test_latent_write_is_in_place_under_donation():
    pool = KVPages(jax.ShapeDtypeStruct((4096, 1, 16, 576), jnp.float32), None)  # type: ignore[arg-type]
    new, ids = jax.ShapeDtypeStruct((16, 1, 576), jnp.float32), jax.ShapeDtypeStruct((16,), "int32")
    store = lambda pages, k, page, offset: write(pages, NewTokens(k, None, page, offset))
    memory: Any = jax.jit(store, donate_argnums=0).lower(pool, new, ids, ids).compile()
    memory = memory.memory_analysis()
    assert memory.alias_size_in_bytes == 4096 * 16 * 576 * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 100


@pytest.mark.parametrize(("dtype", "of_token"), [("bfloat16", 1152), ("int8", 576 + 4)])
def test_page_bytes_count_latents(dtype, of_token):
    cache = CacheShape(61, 1, 576, 512)
    size = {"page_size": 128, "dtype": jnp.dtype(dtype)}
    assert kv_cache.page_bytes(cache, **size) == 61 * 128 * of_token
    [pages] = kv_cache.allocate(cache._replace(num_layers=1), num_pages=3, **size)
    assert pages.k.shape == (3, 1, 128, 576) and pages.v is None and pages.v_scales is None


def test_latent_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match=r"kv_rank is 0; .*; q_rank is -1"):
        LatentConfig(0, 8, 8, 8, q_rank=-1)
