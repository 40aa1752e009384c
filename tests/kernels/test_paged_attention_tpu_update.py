"""The TPU kernel that stores the step's keys and values and attends to them, in the emulator."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.folding import fold_of, unfold
from jaxinfer.kernels.kv_pages import KVPages, NewTokens
from jaxinfer.kernels.paged_attention import AttentionVariant, tpu
from jaxinfer.kernels.paged_attention.tpu import TpuPagedTiling
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

PLAIN: dict[str, Any] = dict.fromkeys(("window", "soft_cap", "sinks", "alibi_slopes"))
ALL: dict[str, Any] = {
    "window": 21,
    "soft_cap": 2.5,
    "sinks": np.array([0.5, -1.0, 3.0, -8.0], np.float32),
    "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
}
# Rows that begin a page, an edge, a group; that end one; that are all there is; chunks that a tile
# of 16 cuts once, twice, and within a group.
MIXED = [(1, 33), (1, 1), (7, 40), (0, 0), (17, 90), (1, 100), (20, 20), (1, 16)]
SHAPE = Shape(num_tokens=64)


class Update:
    """A case whose step is not stored yet: the new slots of its pages are NaN.

    The first `shared[r]` of row r's new tokens are in its pages already and are not to be stored.
    """

    def __init__(self, case: Case, shared: dict[int, int] | None = None):
        self.case = case
        T, (num_pages, K, B, H) = len(case.q), case.k_pages.shape
        self.k, self.v = (np.full((T, K, H), np.nan, case.q.dtype) for _ in range(2))
        self.k_pages, self.v_pages = case.k_pages.copy(), case.v_pages.copy()
        self.write_page = np.full(T, num_pages, np.int32)
        self.free = np.zeros((num_pages, B), bool)  # may hold anything afterwards
        for r, length in enumerate(case.kv_len.tolist()):
            first, end = case.q_start[r : r + 2].tolist()
            for t in range(first, end):
                position = length - (end - t)
                page, offset = case.page_table[r, position // B], position % B
                self.k[t], self.v[t] = case.k_pages[page, :, offset], case.v_pages[page, :, offset]
                if t - first >= (shared or {}).get(r, 0):
                    self.write_page[t] = page
                    for pages in (self.k_pages, self.v_pages):
                        pages[page, :, offset] = np.nan
            if end > first and length % B:
                self.free[case.page_table[r, length // B], length % B :] = True

    def run(
        self, tiling: TpuPagedTiling | None, variant: dict[str, Any], lanes: int, **switches: Any
    ):
        case, H = self.case, self.case.k_pages.shape[3]
        pages = [fold(x, lanes) for x in (self.k_pages, self.v_pages)]
        q, rows, _ = case.arrays()
        offset = np.zeros_like(self.write_page)  # it follows from the rows
        new = NewTokens(*map(jnp.asarray, (self.k, self.v, self.write_page, offset)))
        program = program_of(tiling, tuple(switches.items()))
        stored = KVPages(*map(jnp.asarray, pages))
        out, lse, stored = program(q, new, rows, stored, variant_of({**variant}))
        return np.asarray(out), np.asarray(lse), [np.asarray(unfold(x, H)) for x in stored[:2]]


def fold(pages: np.ndarray, lanes: int) -> np.ndarray:
    P, K, B, H = pages.shape
    fold = fold_of(lanes, H)
    rows = pages.reshape(P, K, B // fold, fold * H)
    return np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, lanes - fold * H)))


@functools.lru_cache
def program_of(tiling: TpuPagedTiling | None, switches: tuple) -> Any:
    """Return one emulated program for all cases of a shape, compiled unoptimized."""
    step = partial(
        tpu.update_and_attend,
        return_lse=True,
        interpret=pltpu.InterpretParams(**dict(switches)),
        tiling=tiling,
    )
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


def check(
    rows,
    shape: Shape = SHAPE,
    *,
    tiling: TpuPagedTiling | None = None,
    shared: dict[int, int] | None = None,
    lanes: int | None = None,
    seed: int = 0,
    variant: dict[str, Any] = PLAIN,
    **switches: Any,
) -> None:
    case = make_case(rows, shape, seed=seed)
    update = Update(case, shared)
    variant = {"scale": shape.head_dim**-0.5} | PLAIN | variant
    out, lse, stored = update.run(tiling, variant, lanes or shape.head_dim, **switches)
    ref, ref_lse = oracle(case, return_lse=True, **variant)
    n = case.num_real
    assert (out[n:] == 0).all() and (lse[n:] == -np.inf).all()
    if n:
        assert_close(out[:n], ref[:n], TOLERANCE[shape.dtype])
        assert np.allclose(lse[:n], ref_lse[:n], rtol=0, atol=100 * TOLERANCE[shape.dtype])
    for pages, truth in zip(stored, (case.k_pages, case.v_pages), strict=True):
        same = (pages == truth) | (np.isnan(pages) & np.isnan(truth))
        wrong = ~same.all(axis=(1, 3)) & ~update.free
        assert not wrong.any(), np.argwhere(wrong).tolist()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("tiling", "variant"),
    [
        (TpuPagedTiling(1, 16, cores=2), PLAIN),
        (TpuPagedTiling(4, 32, slots=4), PLAIN),
        (TpuPagedTiling(128, 64), ALL),
    ],
    ids=["small", "deep", "wide"],
)
def test_step_is_stored_and_results_match_the_formula(tiling, variant):
    check(MIXED, tiling=tiling, variant=variant)


def test_tokens_outside_every_window_are_stored():
    for rows in ([(64, 100)], [(40, 47), (24, 24)]):
        check(rows, tiling=TpuPagedTiling(4, 16, cores=2), variant={"window": 1})


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("head_dim", "page_size", "variant"),
    [(64, 16, ALL), (32, 64, PLAIN), (80, 16, PLAIN)],
    ids=["two in a row", "four in a row", "one and a gap"],
)
def test_folded_pages_match_the_formula(head_dim, page_size, variant):
    shape = dataclasses.replace(SHAPE, head_dim=head_dim, page_size=page_size)
    for rows in (MIXED, [(33, 70), (1, 9), (30, 41)]):
        check(rows, shape, tiling=TpuPagedTiling(2, 16, slots=3), lanes=128, variant=variant)


def test_store_groups_of_tall_tiles_match_the_formula(monkeypatch):
    """The chip is one whose VMEM holds 16 rows of bfloat16 in a tile."""
    monkeypatch.setattr(tpu, "group_rows", lambda pages: 16)
    shape = dataclasses.replace(SHAPE, page_size=32)
    check(MIXED, shape, tiling=TpuPagedTiling(1, 16, slots=4))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "shared",
    [{2: 7}, {2: 3}, {4: 8}, {6: 16}, {6: 17}, {0: 1, 1: 1, 2: 7, 4: 17, 5: 1, 6: 20, 7: 1}],
    ids=str,
)
def test_tokens_not_stored_are_read_from_their_pages(shared):
    check(MIXED, tiling=TpuPagedTiling(1, 16, cores=2), shared=shared)


RACES = {"detect_races": True, "num_cores_or_threads": 2}


def test_page_without_new_tokens_is_not_written():
    """The emulator would report a write to it while the other row reads it as a race."""
    rows = [(20, 20), (20, 25)]
    case = make_case(rows, SHAPE, shared=1)
    update = Update(case, {0: 16, 1: 11})
    variant: dict[str, Any] = ALL | {"scale": 0.25}
    out, _, stored = update.run(TpuPagedTiling(2, 16, slots=3, cores=2), variant, 16, **RACES)
    races: Any = emulator.races
    assert not races.races_found
    assert np.array_equal(stored[0][case.page_table[0, 0]], case.k_pages[case.page_table[0, 0]])
    assert_close(out[:40], oracle(case, **variant)[:40], 1e-5)


def test_stores_do_not_race_with_fetches():
    """No chunk of several tiles has its first token in a group of older ones: its tiles may read
    that group while one of them stores it, by design (`tpu_update.py`)."""
    rows = [(1, 33), (1, 1), (7, 40), (0, 0), (20, 20), (1, 100), (17, 33), (1, 16)]
    check(rows, tiling=TpuPagedTiling(2, 16, slots=3, cores=2), variant=ALL, **RACES)
    races: Any = emulator.races
    assert not races.races_found


def test_narrow_types_match_within_their_precision():
    shape = dataclasses.replace(SHAPE, dtype="bfloat16", cache_dtype="bfloat16")
    check(MIXED, shape, tiling=TpuPagedTiling(2, 16))


def test_steps_of_one_token_match_the_formula():
    shape = dataclasses.replace(SHAPE, num_tokens=1, num_rows=1)
    for rows in ([(1, 1)], [(1, 33)], [(1, 48)], [], [(1, 100)]):
        check(rows, shape)


SMALL = Shape(num_tokens=24, num_rows=5, head_dim=8, page_size=8, table_width=10, num_pages=90)
LENGTHS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=3)


@settings(deadline=None, max_examples=15)
@given(lengths=LENGTHS, seed=st.integers(0, 99), data=st.data())
def test_any_ragged_step_matches_the_formula(lengths, seed, data):
    rows = [(queries, queries + before) for queries, before in lengths]
    shared = {r: data.draw(st.integers(0, n)) for r, (n, _) in enumerate(rows)}
    check(rows, SMALL, shared=shared, seed=seed, variant={"window": 9})


def test_unsupported_pages_are_declined_with_the_reason():
    case = make_case([(1, 5)], Shape(page_size=4))
    q, rows, pages = case.arrays()
    new = NewTokens(q[:, :2], q[:, :2], rows.q_start, rows.q_start)
    variant = AttentionVariant(1.0)
    with pytest.raises(NotImplementedError, match="a page has 4 rows; 8 are stored together"):
        tpu.update_and_attend(q, new, rows, pages, variant)
    scaled = pages._replace(k_scales=pages.k[..., 0], v_scales=pages.k[..., 0])
    with pytest.raises(NotImplementedError, match="the kernel does not quantize what it stores"):
        tpu.update_and_attend(q, new, rows, scaled, variant)
