"""The TPU kernel of paged attention: races, tilings, folded pages, refusals."""

from __future__ import annotations

import dataclasses
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

from jaxinfer.kernels import tuning
from jaxinfer.kernels.folding import fold_of, unfold
from jaxinfer.kernels.kv_pages import KVPages, write_pages
from jaxinfer.kernels.paged_attention import AttentionVariant, RaggedRows, tpu, tpu_tiling
from jaxinfer.kernels.paged_attention.tpu import TpuPagedTiling
from jaxinfer.kernels.paged_attention.tpu_plan import TpuPagedPlan
from jaxinfer.kernels.paged_attention.tpu_prepare import work_list
from tests.support.attention_cases import (
    EMULATED,
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

MIXED = [(1, 33), (1, 1), (7, 40), (0, 0), (20, 90), (1, 100), (17, 17)]
VARIANT: dict[str, Any] = {
    "scale": 0.4,
    "window": 21,
    "soft_cap": 2.5,
    "sinks": np.array([0.5, -1.0, 3.0, -8.0], np.float32),
    "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
}


@pytest.fixture
def emulate(monkeypatch):
    """Set the emulator's switches and the tiling of the tests' TPU backend."""

    def choose(tiling: TpuPagedTiling | None = None, **switches: Any) -> None:
        program_of("tpu").clear_cache()
        params = pltpu.InterpretParams(**switches)
        monkeypatch.setitem(
            EMULATED, "tpu", partial(tpu.paged_attention, interpret=params, tiling=tiling)
        )

    yield choose
    program_of("tpu").clear_cache()


@pytest.mark.parametrize("variant", [{}, VARIANT], ids=["plain", "all"])
def test_fetches_do_not_race_with_arithmetic(emulate, variant):
    emulate(TpuPagedTiling(2, 16, slots=3, cores=2), detect_races=True, num_cores_or_threads=2)
    check(make_case(MIXED), "tpu", **variant)
    races: Any = emulator.races
    assert not races.races_found


TILINGS = [
    TpuPagedTiling(1, 16),
    TpuPagedTiling(4, 32, slots=4),
    TpuPagedTiling(1, 16, slots=2, cores=3),
    TpuPagedTiling(128, 48, slots=2, cores=2),
]


@pytest.mark.matrix
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tilings_match_the_formula(emulate, tiling):
    emulate(tiling)
    for rows in (MIXED, [], [(48, 48)]):
        check(make_case(rows), "tpu", **VARIANT)


def test_unseen_pages_are_not_read():
    """The emulator raises where a read leaves its array."""
    rows, window = [(1, 100), (7, 40), (1, 5)], 20
    case = make_case(rows)
    table = np.full_like(case.page_table, 10**6)
    for r, (queries, length) in enumerate(rows):
        first = max(0, length - queries - window + 1) // 16
        table[r, first : -(-length // 16)] = case.page_table[r, first : -(-length // 16)]
    check(dataclasses.replace(case, page_table=table), "tpu", window=window)


@pytest.mark.parametrize(
    ("lengths", "cores", "shares"),
    [
        ([40] * 8, 2, [4, 4]),
        ([16, 16, 16, 160], 2, [3, 1]),
        ([160, 16, 16, 16], 2, [1, 3]),
        ([16], 3, [1, 0, 0]),
        ([], 2, [0, 0]),
    ],
)
def test_cores_share_the_blocks_evenly(lengths, cores, shares):
    case = make_case([(1, n) for n in lengths])
    sizes = {"tile": 16, "num_items": 12, "pages_a_block": 1, "page_rows": 16, "fold": 1}
    plan: Any = TpuPagedPlan(**{name: sizes.get(name) for name in TpuPagedPlan._fields})  # type: ignore[arg-type]
    rows = RaggedRows(*map(jnp.asarray, (case.q_start, case.kv_len, case.page_table)))
    _, first, steps = work_list(plan, rows, cores)
    ends = [*np.asarray(first)[1:].tolist(), len(lengths)]
    assert (np.array(ends) - np.asarray(first)).tolist() == shares
    assert int(steps.sum()) == sum(-(-n // 16) for n in lengths)


SMALL = Shape(num_tokens=24, num_rows=5, head_dim=8, page_size=8, table_width=10, num_pages=90)
LENGTHS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=3)


@settings(deadline=None, max_examples=15)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_any_ragged_batch_matches_the_formula(lengths, seed):
    rows = [(queries, queries + before) for queries, before in lengths]
    check(make_case(rows, SMALL, seed=seed), "tpu", window=9)


def test_batch_invariant_results_are_bit_equal_in_any_batch():
    alone = make_case([(7, 40)], SMALL)
    among = make_case([(7, 40), (9, 60), (1, 3)], SMALL)
    pages = {"k_pages": alone.k_pages, "v_pages": alone.v_pages}
    table = np.repeat(alone.page_table[:1], 5, axis=0)
    q = np.concatenate([alone.q[:7], np.ones_like(alone.q[7:])])
    kv_len = np.minimum(among.kv_len, 40)
    among = dataclasses.replace(among, q=q, page_table=table, kv_len=kv_len, **pages)
    first, second = (
        run(case, "tpu", scale=0.3, batch_invariant=True)[:7] for case in (alone, among)
    )
    assert np.array_equal(first, second)


def fold(case: Case) -> Case:
    """Return the same case in pages of 128 lanes."""

    def folded(pages):
        P, K, B, H = pages.shape
        copies = fold_of(128, H)
        rows = pages.reshape(P, K, B // copies, copies * H)
        return np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, 128 - copies * H)))

    def of_parts(scales):
        if scales is None:
            return None
        fold = fold_of(128, case.k_pages.shape[3])
        parts = scales.reshape(*scales.shape[:2], -1, fold)
        return np.moveaxis(parts, 3, 2).reshape(scales.shape)

    return dataclasses.replace(
        case,
        k_pages=folded(case.k_pages),
        v_pages=folded(case.v_pages),
        k_scales=of_parts(case.k_scales),
        v_scales=of_parts(case.v_scales),
    )


@pytest.mark.matrix(by="backend")
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(("head_dim", "cache_dtype"), [(64, "int8"), (80, "float32")])
def test_folded_pages_equal_plain_ones(backend, head_dim, cache_dtype):
    shape = Shape(head_dim=head_dim, cache_dtype=cache_dtype)
    case = make_case(MIXED, shape)
    out = run(fold(case), backend, **VARIANT)[: case.num_real]
    ref = oracle(case, **VARIANT)[: case.num_real]
    assert np.linalg.norm(out - ref) <= 1e-5 * np.linalg.norm(ref)


@pytest.mark.matrix
@pytest.mark.parametrize(("head_dim", "lanes"), [(64, 128), (32, 128), (80, 128), (192, 256)])
def test_folded_writes_equal_plain_ones(head_dim, lanes):
    rng = np.random.default_rng(0)
    pages = np.zeros((6, 2, 8, lanes), np.float32)
    fold = fold_of(lanes, head_dim)
    pages[..., : fold * head_dim] = rng.normal(size=(6, 2, 8, fold * head_dim))
    new = rng.normal(size=(9, 2, head_dim)).astype(np.float32)
    page = np.array([3, 3, 3, 3, 3, 0, 6, 2**31 - 1, 5], np.int32)  # the pool has 6
    offset = np.array([1, 2, 3, 4, 5, 7, 6, 0, 0], np.int32)
    out = write_pages(*map(jnp.asarray, (pages, new, page, offset)))
    plain = write_pages(
        unfold(jnp.asarray(pages), head_dim), *map(jnp.asarray, (new, page, offset))
    )
    assert np.array_equal(unfold(out, head_dim), plain)
    assert not np.asarray(out)[..., fold * head_dim :].any()


def test_folded_writes_are_in_place_under_donation():
    pages = jax.ShapeDtypeStruct((4096, 2, 8, 128), jnp.float32)
    new = jax.ShapeDtypeStruct((16, 2, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    program = jax.jit(write_pages, donate_argnums=0).lower(pages, new, ids, ids).compile()
    memory: Any = program.memory_analysis()
    assert memory.alias_size_in_bytes == 4096 * 2 * 8 * 128 * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 100


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_dtype": "float16"}, "Mosaic loads no float16"),
        ({"page_size": 4}, "a page has 4 rows; a DMA needs a multiple of 8"),
    ],
)
def test_tpu_declines_with_the_reason(change, reason):
    case = make_case([(1, 5)], Shape(**change))
    with pytest.raises(NotImplementedError, match=reason):
        tpu.paged_attention(*case.arrays(), AttentionVariant(1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 8), "query_tile 8 is no multiple of 16"),
        ((3, 16), "pages_a_block 3 does not divide 128"),
        ((1, 16, 1), "slots 1 must be 2 or more"),
    ],
)
def test_invalid_tilings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TpuPagedTiling(*values)


HEADS = [(9, 3, 64), (32, 8, 128), (8, 1, 128), (8, 4, 256), (71, 1, 64), (32, 32, 128)]


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_heuristic_leaves_a_quarter_of_vmem_to_the_compiler(
    page_size, num_heads, num_kv_heads, head_dim
):
    lanes = -(-head_dim // 128) * 128
    rows = page_size // fold_of(lanes, head_dim)
    for dtype, T in ((jnp.bfloat16, 1), (jnp.bfloat16, 2048), (jnp.float32, 2048)):
        q = jax.ShapeDtypeStruct((T, num_heads, head_dim), dtype)
        pages = jax.ShapeDtypeStruct((9, num_kv_heads, rows, lanes), dtype)
        tiling = tpu_tiling.heuristic(q, pages)
        assert tpu_tiling.vmem_bytes(tiling, q, pages) <= 12 * 2**20, tiling


@pytest.mark.parametrize("device", ["TPU v4", "TPU v6 lite"])
def test_pages_too_large_for_vmem_are_declined(monkeypatch, device):
    monkeypatch.setattr(tpu_tiling, "device_kind", lambda: device)
    q = jax.ShapeDtypeStruct((16, 64, 128), jnp.float32)
    pages = jax.ShapeDtypeStruct((9, 64, 512, 128), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"tiles of [0-9.]+ MiB; VMEM has room for"):
        tpu_tiling.check_mosaic(tpu_tiling.heuristic(q, pages), q, pages)


ANY_ROWS: Any = RaggedRows(*[jax.ShapeDtypeStruct((1,), jnp.int32)] * 3)  # type: ignore[arg-type]


def test_candidates_fit_and_include_the_heuristic():
    q = jax.ShapeDtypeStruct((512, 32, 128), jnp.bfloat16)
    pages: Any = jax.ShapeDtypeStruct((9, 8, 64, 128), jnp.bfloat16)
    found = tpu.candidates(q, ANY_ROWS, KVPages(pages, pages))
    assert tpu_tiling.heuristic(q, pages) in found
    assert len(set(found)) == len(found) < 100
    for tiling in found:
        tpu_tiling.check_mosaic(tiling, q, pages)


def test_measured_tiling_is_used(monkeypatch):
    q = jax.ShapeDtypeStruct((512, 32, 64), jnp.bfloat16)
    pages: Any = jax.ShapeDtypeStruct((9, 8, 32, 128), jnp.int8)
    key = tpu.tiling_key(q, ANY_ROWS, KVPages(pages, pages))
    assert key == "T=512 N=32 K=8 H=64 B=64 bfloat16 int8"
    files = {"paged_attention/tpu": {key: {"pages_a_block": 2, "slots": 3}}}
    monkeypatch.setattr(tuning, "load", lambda path: files)
    tiling = tpu_tiling.tiling_of(q, pages)
    expected = {"pages_a_block": 2, "slots": 3}
    assert tiling == dataclasses.replace(tpu_tiling.heuristic(q, pages), **expected)


@pytest.mark.parametrize(("device", "limit"), [("TPU v4", 15), ("TPU v5 lite", 16)])
def test_small_vmem_keeps_room_for_the_compiler(monkeypatch, device, limit):
    monkeypatch.setattr(tpu_tiling, "device_kind", lambda: device)
    assert tpu_tiling.vmem_limit(10 * 2**20) == limit * 2**20


def test_store_group_has_the_rows_of_a_tile(monkeypatch):
    pages = jax.ShapeDtypeStruct((9, 8, 8, 128), jnp.bfloat16)
    tpu_tiling.check_update(pages)
    monkeypatch.setattr(tpu_tiling, "device_kind", lambda: "TPU7x")
    with pytest.raises(NotImplementedError, match="a page has 8 rows; 16 are stored together"):
        tpu_tiling.check_update(pages)
