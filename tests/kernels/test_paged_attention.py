"""Paged attention: every backend compared with the formula, at the sizes and edges of real
steps."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention_cases import (
    EVERY_BACKEND,
    Case,
    Shape,
    check,
    make_case,
    oracle,
    program_of,
    run,
)

pytestmark = pytest.mark.conformance

every_backend = pytest.mark.parametrize("backend", EVERY_BACKEND)
# Emulators are slow: tests with many programs or runs have smaller versions for each kernel.
every_quick_backend = pytest.mark.parametrize("backend", ["reference", "xla"])

# Decodes, chunks, an empty row in between, a whole prompt; lengths on both sides of pages.
MIXED = [(1, 33), (1, 1), (7, 40), (0, 0), (1, 16), (20, 20), (1, 100), (3, 17)]
SINKS = np.array([0.5, -1.0, 3.0, -8.0], np.float32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)

VARIANTS = {
    "plain": {},
    "window of one": {"window": 1},
    "window over a page": {"window": 17},
    "window longer than any row": {"window": 1000},
    "soft cap": {"soft_cap": 2.0, "scale": 1.0},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi, sinks, soft cap": {"alibi_slopes": SLOPES, "sinks": SINKS, "soft_cap": 3.0},
    "all": {
        "scale": 0.4,
        "window": 21,
        "soft_cap": 2.5,
        "sinks": SINKS,
        "alibi_slopes": SLOPES,
    },
}


@pytest.mark.matrix(by=("backend", "variant"))
@every_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_the_formula(backend, variant):
    check(make_case(MIXED), backend, **VARIANTS[variant])


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 64), (6, 2, 80), (3, 1, 96), (4, 2, 128), (4, 1, 192), (2, 1, 256)],
)
def test_head_shapes_of_models_match_the_formula(backend, num_heads, num_kv_heads, head_dim):
    shape = Shape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, num_tokens=16, num_rows=4
    )
    check(make_case([(1, 20), (9, 30), (1, 3), (2, 2)], shape), backend)


@pytest.mark.matrix(by=("backend", "page_size"))
@every_backend
@pytest.mark.parametrize("page_size", [1, 8, 32, 128, 256])
def test_lengths_around_page_boundaries_match_the_formula(backend, page_size):
    B = page_size
    shape = Shape(
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        page_size=B,
        table_width=max(4, 80 // B),
        num_pages=max(40, 400 // B),
    )
    around = [n for n in (B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1) if n > 0]
    check(make_case([(1, n) for n in around], shape), backend)
    check(make_case([(min(n, 7), n) for n in around], shape, seed=1), backend)
    whole = [(n, n) for n in (B - 1, B, B + 1) if 0 < n <= 16]
    check(make_case(whole or [(16, B + 16), (16, B), (16, 2 * B + 1)], shape), backend)


EDGES = {
    "one token": [(1, 1)],
    "no rows at all": [],
    "rows of nothing": [(0, 0), (0, 5), (0, 0)],
    "empty rows around": [(0, 0), (1, 5), (0, 0), (4, 9), (0, 0)],
    "every token its own row": [(1, n) for n in (1, 2, 3, 64, 65, 15, 16, 17)],
    "one row over all tokens": [(48, 48)],
    "one row, a late chunk": [(48, 191)],
    "one token short": [(47, 100)],
    "the longest table": [(1, 192), (2, 192)],
    "chunks of two": [(2, 2)] * 8,
    "pairs on both sides of a page": [(2, n) for n in (15, 16, 17, 18, 31, 32, 33, 34)],
    "a chunk before a decode": [(40, 40), (1, 1), (1, 64)],
}


@pytest.mark.matrix(by=("backend", "edge"))
@every_backend
@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_match_the_formula(backend, edge):
    check(make_case(EDGES[edge]), backend)
    check(make_case(EDGES[edge]), backend, window=3, sinks=SINKS)


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (2, 2), (4, 4)])
def test_step_with_as_many_rows_as_tokens_matches_the_formula(backend, num_tokens, num_rows):
    shape = Shape(num_tokens=num_tokens, num_rows=num_rows)
    fillings = [[(n, n + 3)] for n in range(num_tokens + 1)]
    fillings += [[(n, n), (num_tokens - n, 40)] for n in range(num_tokens)] if num_rows > 1 else []
    for rows in fillings:
        check(make_case(rows, shape), backend)


@every_backend
def test_long_row_among_short_ones_matches_the_formula(backend):
    shape = Shape(
        num_tokens=24,
        num_rows=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        page_size=64,
        table_width=128,
        num_pages=160,
    )
    check(make_case([(1, 1)] * 11 + [(1, 8192)] + [(1, 1)] * 12, shape), backend)


@every_backend
def test_chunks_longer_than_a_tile_match_the_formula(backend):
    shape = Shape(
        num_tokens=300, num_rows=3, num_heads=2, num_kv_heads=1, head_dim=8, table_width=40
    )
    for rows in ([(299, 299), (1, 5)], [(129, 129), (128, 300), (1, 64)], [(150, 400), (150, 150)]):
        check(make_case(rows, shape), backend)


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
        ("float16", "float16"),
    ],
)
def test_narrow_types_match_within_their_precision(backend, dtype, cache_dtype):
    shape = Shape(dtype=dtype, cache_dtype=cache_dtype)
    check(make_case(MIXED, shape), backend, **VARIANTS["all"])


QUANTIZED = [("float32", "int8"), ("bfloat16", "int8"), ("float32", "float8_e4m3fn")]


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(("dtype", "cache_dtype"), QUANTIZED)
def test_quantized_pages_match_stored_numbers_times_scales(backend, dtype, cache_dtype):
    """The oracle multiplies the same stored numbers, so that the kernel's own error shows."""
    shape = Shape(dtype=dtype, cache_dtype=cache_dtype, page_size=32)
    check(make_case(MIXED, shape), backend)
    check(make_case(MIXED, shape), backend, **VARIANTS["all"])


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("int8", 2e-2), ("float8_e4m3fn", 5e-2)])
def test_quantized_pages_stay_close_to_the_originals(cache_dtype, tolerance):
    exact, stored = (make_case(MIXED, Shape(cache_dtype=d)) for d in ("float32", cache_dtype))
    out, ref = oracle(stored, scale=0.25), oracle(exact, scale=0.25)
    assert np.linalg.norm(out - ref) <= tolerance * np.linalg.norm(ref)


@every_backend
def test_rows_may_share_pages(backend):
    rows = [(1, 33), (5, 40), (1, 64), (1, 50), (8, 33)]
    case = make_case(rows, shared=2)
    assert len(set(case.page_table[:5, 0])) == 1
    check(case, backend)


@every_backend
def test_large_scores_do_not_overflow(backend):
    case = make_case(MIXED)
    big = dataclasses.replace(case, q=case.q * 300)
    check(big, backend, 1e-4)
    check(big, backend, 1e-4, sinks=np.array([200.0, -300.0, 0.0, 90.0], np.float32))


@every_backend
def test_unowned_memory_never_reaches_the_output(backend):
    """Memory holds infinities and huge numbers where the other cases have NaN."""
    case = make_case(MIXED)
    clean = run(case, backend, scale=0.25)
    for poison in (np.inf, -np.inf, 3e38):
        fill = lambda pages, poison=poison: np.where(np.isnan(pages), poison, pages).astype("f")
        other = dataclasses.replace(case, k_pages=fill(case.k_pages), v_pages=fill(case.v_pages))
        assert np.array_equal(run(other, backend, scale=0.25), clean)


@every_quick_backend
def test_results_do_not_depend_on_the_table_width(backend):
    narrow = make_case(MIXED)
    wide = np.pad(narrow.page_table, ((0, 0), (0, 53)), constant_values=narrow.page_table[-1, -1])
    out = run(narrow, backend, scale=0.25)
    wider = run(dataclasses.replace(narrow, page_table=wide), backend, scale=0.25)
    assert np.allclose(out, wider, rtol=0, atol=1e-6)
    if backend != "reference":  # which sums over the whole table
        assert np.array_equal(out, wider)


SMALL = Shape(num_tokens=24, num_rows=5, head_dim=8, page_size=4, table_width=16, num_pages=90)
# (queries, tokens before them) of up to five rows.
ROWS = st.lists(st.tuples(st.integers(0, 24), st.integers(0, 40)), max_size=5).map(
    lambda rows: [
        (queries, queries + before)
        for (queries, before), total in zip(
            rows, itertools.accumulate(queries for queries, _ in rows), strict=True
        )
        if total <= 24
    ]
)


@every_quick_backend
@settings(deadline=None, max_examples=60)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_any_ragged_batch_matches_the_formula(backend, rows, seed):
    check(make_case(rows, SMALL, seed=seed), backend)
    check(make_case(rows, SMALL, seed=seed), backend, window=6, sinks=SINKS)


def _sequence(shape: Shape, length: int) -> Case:
    """Return a case of one row, all of whose tokens are queries."""
    return make_case([(length, length)], dataclasses.replace(shape, num_tokens=length, num_rows=1))


def _split(whole: Case, chunk: tuple[int, int], T: int, R: int, at: int) -> Case:
    """Return queries [first, end) of `whole` as row `at` of a step of T tokens.

    The other rows are decodes over the same pages, so that the row has neighbours.
    """
    first, end = chunk
    q = np.full((T, *whole.q.shape[1:]), np.nan, np.float32)
    q_len = np.zeros(R, np.int32)
    q_len[:at] = 1
    q_len[at] = end - first
    kv_len = np.minimum(1 + 7 * np.arange(R), 40).astype(np.int32) * (q_len > 0)
    kv_len[at] = end
    q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    q[:at] = 0.5
    q[at : at + end - first] = whole.q[first:end]
    table = np.repeat(whole.page_table, R, axis=0)
    return Case(q, whole.k_pages, whole.v_pages, q_start, kv_len, table)


@pytest.mark.matrix(by="backend")
@every_quick_backend
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_batch_invariant_results_are_bit_equal_in_any_batch(backend, variant):
    options = {"scale": 0.25, **VARIANTS[variant], "batch_invariant": True}
    whole = _sequence(SMALL, 40)
    truth = run(whole, backend, **options)
    sizes = ((1, 1, 0), (64, 16, 7)) if variant == "plain" else ((4, 4, 0), (64, 16, 7))
    for T, R, at in sizes:
        most = T - at
        for first in range(0, 40, most)[-12:]:
            end = min(first + most, 40)
            out = run(_split(whole, (first, end), T, R, at), backend, **options)
            assert np.array_equal(out[at : at + end - first], truth[first:end]), (T, R, first)


@every_quick_backend
def test_batch_invariant_results_match_the_formula(backend):
    check(make_case(MIXED), backend, batch_invariant=True)
    check(make_case([(24, 30), (0, 0), (24, 24)]), backend, batch_invariant=True, window=4)


@every_quick_backend
def test_chunked_prefill_equals_whole_prefill(backend):
    whole = _sequence(SMALL, 40)
    truth = run(whole, backend, scale=0.25)
    for first, end in ((0, 1), (0, 16), (16, 29), (29, 30), (30, 40)):
        out = run(_split(whole, (first, end), 24, 5, 2), backend, scale=0.25)
        assert np.allclose(out[2 : 2 + end - first], truth[first:end], rtol=0, atol=2e-6)


@every_backend
def test_one_program_serves_all_lengths(backend):
    shape = Shape(num_tokens=13, num_rows=4, head_dim=24)  # no other test's
    program: Any = program_of(backend)  # the size of its cache is no public name
    before = program._cache_size()
    for rows in ([], [(1, 1)] * 4, [(13, 13)], [(1, 100), (12, 60)]):
        run(make_case(rows, shape), backend, scale=1.0)
    assert program._cache_size() == before + 1
