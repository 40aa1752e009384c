"""The GPU's paged attention: its division of the work, merging, tilings and refusals.

Conformance is in `test_paged_attention.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention import AttentionVariant, RaggedRows, gpu, gpu_plan
from jaxinfer.kernels.paged_attention.gpu_tiling import GpuPagedTiling
from jaxinfer.kernels.triton_launch import Recorder, TritonLaunch, interpret
from tests.support.attention_cases import (
    VARIANT,
    Case,
    Shape,
    assert_close,
    make_case,
    oracle,
    variant_of,
)
from tests.support.triton_bench import needs_triton

pytestmark = [pytest.mark.conformance, needs_triton]

MIXED = [(1, 33), (1, 1), (7, 40), (0, 0), (1, 16), (20, 20), (1, 100), (3, 17)]
SINKS = np.array([0.5, -1.0, 3.0, -8.0], np.float32)
SMALL = Shape(num_tokens=24, num_rows=24, num_heads=2, num_kv_heads=1, head_dim=8)


class RecordingLauncher:
    """A launcher that keeps the outputs of the kernel."""

    def __init__(self) -> None:
        self.plan: Any = None
        self.outputs: Any = ()

    def __call__(self, launch: TritonLaunch) -> tuple[jax.Array, ...]:
        self.plan = launch.constexprs["plan"]
        self.outputs = interpret(launch)
        return self.outputs

    @property
    def parts(self) -> Any:
        """Which of [programs, 2] hold a part of a unit that was split."""
        return ~np.isnan(self.outputs[3][:, :, 0]).all(axis=-1)

    @property
    def counters(self) -> Any:
        return self.outputs[4]


def attend(
    case: Case, launcher: RecordingLauncher | None = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the backend, compiled unoptimized: it runs once."""
    options = {"scale": case.q.shape[2] ** -0.5, "return_lse": True, **options}
    launcher, variant = launcher or RecordingLauncher(), variant_of(options)

    def call(*arguments):
        return gpu.paged_attention(*arguments, **options, launch=launcher), launcher.outputs

    program = jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})
    (out, lse), launcher.outputs = jax.tree.map(np.asarray, program(*case.arrays(), variant))
    return out, lse


def check(case: Case, launcher: RecordingLauncher | None = None, **options: Any) -> None:
    out, lse = attend(case, launcher, **options)
    variant = {k: v for k, v in options.items() if k in VARIANT}
    scale = case.q.shape[2] ** -0.5
    ref, ref_lse = oracle(case, scale=scale, **variant, return_lse=True)
    n = case.num_real
    if n:
        assert_close(out[:n], ref[:n], 1e-5)
    assert np.allclose(lse[:n], ref_lse[:n], rtol=0, atol=1e-5)
    assert (out[n:] == 0).all() and (lse[n:] == -np.inf).all()


def divide(active: int, total: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return where stretches start, and the programs of 4096 blocks, by the kernel's arithmetic."""
    from tests.support import division_kernel

    outputs = tuple(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (512, 4096))
    launch = TritonLaunch(division_kernel.divide, (1,), (active, total, first), outputs)
    starts, owner = (np.asarray(x) for x in interpret(launch))
    return starts[: active + 1], owner[: total - first]


@settings(deadline=None, max_examples=15)
@given(total=st.integers(1, 4096), programs=st.integers(1, 511))
def test_program_shares_differ_by_at_most_one_block(total, programs):
    active = min(total, programs)
    starts, owner = divide(active, total)
    shares = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == total
    assert shares.min() >= 1 and shares.max() - shares.min() <= 1
    assert np.array_equal(owner, np.repeat(np.arange(active), shares))


def test_division_of_long_work_does_not_overflow():
    total = 1 << 24
    expected = np.arange(265) * total // 264
    starts, owner = divide(264, total, first=int(expected[263]) - 2048)
    assert np.array_equal(starts, expected)
    assert np.array_equal(owner, np.repeat([262, 263], 2048))  # 4.4e9: block * programs
    _, owner = divide(264, total, first=total - 4096)
    assert (owner == 263).all()


def plan_for(window: int | None, row_block: int) -> Any:
    """Return the plan of a step of 45 tokens and 5 rows."""
    abstract: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    options = {"scale": 1.0, "window": window, "soft_cap": None, "is_split": True}
    flags = {name: False for name in ("has_sinks", "has_slopes", "has_scales", "has_lse")}
    rows: Any = RaggedRows(abstract(6), abstract(5), abstract(5, 8))
    arrays = (abstract(45, 4, 8), abstract(9, 2, 16, 8), rows)
    return gpu.plan_of(GpuPagedTiling(row_block, 16, 2, 4, 1), *arrays, **options, **flags)


_work_list = jax.jit(gpu_plan.work_list, static_argnums=0)
ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=5, max_size=5)


@settings(deadline=None, max_examples=25)
@given(rows=ROWS, window=st.sampled_from([None, 1, 17]), row_block=st.sampled_from([16, 32]))
def test_work_list_has_the_tiles_of_every_row_in_order(rows, window, row_block):
    plan = plan_for(window, row_block)
    q_start = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    kv_len = np.array([n + before for n, before in rows], np.int32)
    items = np.asarray(_work_list(plan, q_start, kv_len))
    expected = []
    for r, (queries, before) in enumerate(rows):
        for index in range(0, queries, plan.tile):
            count, position = min(plan.tile, queries - index), before + index
            oldest = 0 if window is None else max(position - window + 1, 0)
            block, end = oldest // 16, (position + count - 1) // 16 + 1
            expected.append([r, q_start[r] + index, count, position, block, end - block])
    assert len(expected) <= plan.num_items
    assert items[:6, : len(expected)].T.tolist() == expected
    blocks = [item[5] for item in expected] + [0] * (plan.num_items - len(expected))
    assert np.array_equal(items[6], np.cumsum(blocks)) and (items[5] == blocks).all()


def test_long_row_is_shared_by_the_whole_grid():
    shape = dataclasses.replace(SMALL, page_size=64, table_width=128, num_pages=160)
    case = make_case([(1, 1)] * 11 + [(1, 8192)] + [(1, 1)] * 12, shape)
    launcher = RecordingLauncher()
    check(case, launcher, tiling=GpuPagedTiling(16, 64, 2, 4, 4))
    # 128 of 151 blocks are its: of 12 programs with 12 or 13 each, the first and last have others
    assert launcher.plan.programs == 12
    assert launcher.parts.any(axis=1).sum() >= 11
    assert (launcher.counters == 0).all()


@pytest.mark.matrix
@pytest.mark.parametrize("occupancy", [1, 5])
@pytest.mark.parametrize("rows", ["decodes", "mixed"])
def test_split_units_are_merged(rows, occupancy):
    decodes = [(1, n) for n in (1, 16, 17, 150, 33, 2, 64, 129)]
    shape = Shape(num_tokens=8, num_rows=8) if rows == "decodes" else Shape()
    case = make_case(decodes if rows == "decodes" else MIXED, shape)
    launcher = RecordingLauncher()
    tiling = GpuPagedTiling(16, 16, 2, 4, occupancy)
    check(case, launcher, tiling=tiling, sinks=SINKS)
    assert launcher.parts.any(), "nothing was cut"
    assert (launcher.counters == 0).all()
    out, lse = attend(case, tiling=tiling, sinks=SINKS)
    assert np.array_equal(out, launcher.outputs[0]) and np.array_equal(lse, launcher.outputs[1])


def test_fewer_blocks_than_programs_match_the_formula():
    for rows in ([], [(2, 3), (1, 17)]):
        check(make_case(rows, SMALL), tiling=GpuPagedTiling(16, 16, 2, 4, 9))


def test_parts_are_merged_in_runs_of_lanes():
    shape = Shape(num_tokens=40, num_rows=3, num_heads=2, num_kv_heads=1, head_dim=192)
    case, launcher = make_case([(17, 120), (1, 60), (20, 20)], shape), RecordingLauncher()
    check(case, launcher, tiling=GpuPagedTiling(64, 16, 2, 4, 3))
    assert launcher.plan.merged_lanes < launcher.plan.lanes
    assert launcher.parts.any()


def test_candidate_tilings_match_the_formula():
    case = make_case([(1, 33), (9, 40)], Shape(num_tokens=12, num_rows=3))
    found = gpu.candidates(*case.arrays(), AttentionVariant(1.0))
    assert len(set(found)) == len(found) > 20
    # stages and warps are the compiler's; an interpreter sees the same program
    for row_block, block in sorted({(t.row_block, t.block) for t in found}):
        check(case, tiling=GpuPagedTiling(row_block, block, 2, 4, 1))


def test_pages_outside_the_window_are_not_read():
    case = make_case([(1, 100), (5, 90), (1, 33)])
    table = case.page_table.copy()
    for r, oldest in enumerate((100 - 20, 85 - 20, 33 - 20)):
        table[r, : oldest // 16] = 10**6  # no such page
    check(dataclasses.replace(case, page_table=table), window=20)


def test_batch_invariant_mode_splits_no_unit():
    shape = Shape(num_tokens=16, num_rows=16)
    rows = [(1, 150), (1, 40), (1, 17), (1, 90)]
    alone = make_case(rows[:1], shape)
    together = make_case(rows, shape)
    pages = {"k_pages": together.k_pages, "v_pages": together.v_pages}
    alone = dataclasses.replace(alone, **pages, page_table=together.page_table, q=together.q)
    truth, launcher = attend(together, batch_invariant=True), RecordingLauncher()
    out, lse = attend(alone, launcher, batch_invariant=True)
    assert not launcher.parts.any()
    assert np.array_equal(out[0], truth[0][0]) and np.array_equal(lse[0], truth[1][0])
    check(together, batch_invariant=True, tiling=GpuPagedTiling(16, 16, 2, 4, 5))
    check(make_case(MIXED), batch_invariant=True)


def test_float8_values_are_decoded_exactly():
    """A token that sees itself alone gets its value back."""
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    v = codes.view(jnp.float8_e4m3fn).reshape(1, 1, 16, 16)
    shape = Shape(num_tokens=16, num_rows=16, num_heads=1, num_kv_heads=1)
    case = make_case([(1, 1)] * 16, shape)
    pages = np.concatenate([np.zeros((16, 1, 16, 16), v.dtype)], axis=0)
    pages[:, 0, 0] = v[0, 0]
    ones = np.ones((16, 1, 16), np.float32)
    table = np.arange(16, dtype=np.int32)[:, None]
    case = Case(case.q, pages, pages, case.q_start, case.kv_len, table, ones, ones)
    out, _ = attend(case)
    assert np.array_equal(out[:, 0], v[0, 0].astype(np.float32))


def on_gpu(kind: str, num_cores: int, case: Case, **options: Any) -> TritonLaunch:
    """Return the launch of a call that is traced for a GPU of another machine."""
    recorder = Recorder()
    device = AbstractDevice(device_kind=kind, num_cores=num_cores, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        variant = AttentionVariant(1.0)
        call = partial(gpu.paged_attention, variant=variant, **options, launch=recorder)
        jax.eval_shape(call, *case.arrays())
    (launch,) = recorder.launches
    return launch


@pytest.mark.parametrize(
    ("kind", "num_cores"), [("NVIDIA A100-SXM4-80GB", 108), ("NVIDIA H100 80GB HBM3", 132)]
)
def test_grid_size_is_multiprocessors_times_occupancy(kind, num_cores):
    shape = Shape(num_tokens=16, num_rows=16, dtype="bfloat16", cache_dtype="bfloat16")
    shape = dataclasses.replace(shape, head_dim=128, table_width=100)
    launch = on_gpu(kind, num_cores, make_case([(1, 40)], shape))
    assert launch.grid[0] % num_cores == 0 and 2 <= launch.grid[0] // num_cores <= 3
    assert launch.grid[0] == launch.constexprs["plan"].programs
    assert launch.outputs[4].shape == launch.inputs[10].shape == launch.grid


def test_float8_pages_are_passed_as_int8():
    shape = Shape(cache_dtype="float8_e4m3fn")
    launch = on_gpu("NVIDIA A100-SXM4-80GB", 108, make_case(MIXED, shape))
    assert launch.signature["k_pages"] == launch.signature["v_pages"] == "*i8"
    assert launch.signature["k_scales"] == "*fp32"


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_heuristic_has_a_tiling_for_any_shape(stored):
    dtype = "float32" if stored == "float32" else "bfloat16"
    for group, R, H in itertools.product((1, 3, 16, 71), (64, 5), (8, 64, 80, 192, 256)):
        q = jax.ShapeDtypeStruct((64, 2 * group, H), jnp.dtype(dtype))
        pages: Any = jax.ShapeDtypeStruct((9, 2, 16, H), jnp.dtype(stored))
        i32: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        rows = RaggedRows(i32(R + 1), i32(R), i32(R, 2))
        assert gpu.heuristic(q, pages, rows.kv_len).row_block >= group
        key = gpu.tiling_key(q, rows, KVPages(pages, pages), AttentionVariant(1.0))
        assert key == f"T=64 R={R} N={2 * group} K=2 H={H} B=16 {dtype} {stored}"


def test_refusals_name_the_reason():
    case = make_case(MIXED)
    other = dataclasses.replace
    eighth, bytes_, half = (
        np.zeros(case.k_pages.shape, dtype) for dtype in (jnp.float8_e5m2, np.int8, np.float16)
    )
    ones = np.ones(case.k_pages.shape[:3], np.float32)
    for wrong, words in (
        (
            other(case, q=np.zeros(case.q.shape, np.int32)),
            "queries of int32; it takes float32, bfloat16",
        ),
        (other(case, k_pages=eighth), "k_pages of float8_e5m2; it takes"),
        (other(case, v_pages=eighth), "v_pages of float8_e5m2; it takes"),
        (other(case, k_pages=bytes_), "k_pages of int8 with no k_scales"),
        (other(case, k_scales=ones), "k_pages of float32 with k_scales"),
        (other(case, k_pages=half), "float16 and v_pages of float32"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            attend(wrong)
    with pytest.raises(ValueError, match="row_block 16 holds no group of 20 heads"):
        shape = Shape(num_tokens=2, num_rows=2, num_heads=20, num_kv_heads=1)
        attend(make_case([(1, 4)], shape), tiling=GpuPagedTiling(16, 16, 2, 4, 1))
    for fields, words in (
        ((24, 16, 2, 4, 1), "row_block is 24; it must be a power of two"),
        ((16, 8, 2, 4, 1), "block is 8; it must be a power of two of at least 16"),
        ((16, 16, 0, 4, 1), "stages is 0; it must be at least 1"),
        ((16, 16, 2, 3, 1), "num_warps is 3; it must be a power of two"),
    ):
        with pytest.raises(ValueError, match=words):
            GpuPagedTiling(*fields)


def test_old_or_unknown_gpu_is_declined():
    case = make_case([(1, 4)])
    with pytest.raises(NotImplementedError, match="compute capability of 'Tesla K80'"):
        on_gpu("Tesla K80", 13, case)
    with pytest.raises(NotImplementedError, match="'NVIDIA H100' does not say how many"):
        on_gpu("NVIDIA H100", 0, case)
