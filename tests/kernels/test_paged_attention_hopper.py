"""The Hopper kernel in Pallas' emulator: copies, barriers, slots, masks and stores are the kernel's
own; plain JAX replaces products and layouts that the emulator lacks (`hopper_products.py`). The
kernel with nothing replaced is lowered for a GPU, which checks layouts, but not run."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.core import eval_jaxpr
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as emulator
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention import RaggedRows, hopper
from jaxinfer.kernels.paged_attention.hopper import HopperTiling
from jaxinfer.kernels.paged_attention.hopper_plan import (
    HopperItem,
    HopperPlan,
    num_items,
    work_list,
)
from tests.support.attention_cases import (
    EMULATED,
    Shape,
    check,
    make_case,
    program_of,
    run,
    variant_of,
)

pytestmark = pytest.mark.conformance

HASTE: Any = {"xla_backend_optimization_level": 0}
SHAPE = Shape(
    num_tokens=40,
    num_rows=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_pages=40,
    dtype="bfloat16",
    cache_dtype="bfloat16",
)
# A decode, a chunk longer than a warpgroup's share, an empty row, a chunk after a context.
MIXED = [(1, 33), (33, 33), (0, 0), (5, 150)]
VARIANT: dict[str, Any] = {
    "scale": 0.4,
    "window": 21,
    "soft_cap": 2.5,
    "sinks": np.array([0.5, -1.0, 3.0, -8.0], np.float32),
    "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
}


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    """Compile the kernel once a call; the emulator would do so for each thread of each unit."""
    programs: dict[int, Any] = {}
    lock = threading.Lock()

    def run_jaxpr(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in programs:
                of_jaxpr = lambda consts, *args: eval_jaxpr(jaxpr, consts, *args)
                lowered = jax.jit(of_jaxpr).lower(consts, *args)
                programs[id(jaxpr)] = (lowered.compile(compiler_options=HASTE), jaxpr)
        programs[id(jaxpr)][0](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run_jaxpr)


@pytest.fixture
def emulate(monkeypatch):
    """Set the emulator's switches and the tiling of the tests' Hopper backend."""

    def choose(tiling: HopperTiling, **switches: Any) -> None:
        # A box of queries may reach past the last token: TMA fills up with zeros.
        switches.setdefault("out_of_bounds_reads", "uninitialized")
        program_of("hopper").clear_cache()
        backend = partial(
            hopper.paged_attention, interpret=InterpretGPUParams(**switches), tiling=tiling
        )
        monkeypatch.setitem(EMULATED, "hopper", backend)

    choose(HopperTiling(64, 2))
    yield choose
    emulator.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("variant", [{}, VARIANT], ids=["plain", "all"])
def test_chunks_and_decodes_match_the_formula(emulate, variant):
    check(make_case(MIXED, SHAPE), "hopper", **variant)


TILINGS = [HopperTiling(64, 3, 1), HopperTiling(128, 2)]


@pytest.mark.matrix
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tilings_match_the_formula(emulate, tiling):
    emulate(tiling)
    check(make_case(MIXED, SHAPE), "hopper", **VARIANT)


MODELS = {
    "G=3, small pages, float16": {"num_heads": 3, "page_size": 8, "dtype": "float16"},
    "G=1, pages longer than a block": {"num_heads": 1, "page_size": 128},
    "G=8, head dim 128": {"num_heads": 8, "head_dim": 128, "page_size": 64},
    "head dim 256": {"num_heads": 2, "head_dim": 256, "page_size": 32},
}


@pytest.mark.matrix
@pytest.mark.parametrize("model", MODELS)
def test_head_and_page_sizes_match_the_formula(emulate, model):
    sizes = {"num_tokens": 24, "num_rows": 2, "num_kv_heads": 1, **MODELS[model]}
    sizes["table_width"] = 160 // SHAPE.page_size
    shape = dataclasses.replace(SHAPE, **sizes, cache_dtype=sizes.get("dtype", "bfloat16"))
    check(make_case([(3, 7), (20, 70)], shape), "hopper")


ONE_HEAD = dataclasses.replace(SHAPE, num_heads=2, num_kv_heads=1, num_tokens=80)
EDGES = {
    "no rows at all": [],
    "a whole tile and no more": [(64, 64)],
    "all tokens": [(80, 191)],
    "a chunk that ends with a block": [(40, 128), (1, 64)],
}


@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_match_the_formula(emulate, edge):
    check(make_case(EDGES[edge], ONE_HEAD), "hopper")


@pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("poison", [np.inf, 3e38])
def test_unowned_memory_never_reaches_the_output(emulate, poison):
    """Memory holds infinities and huge numbers where the other cases have NaN."""
    case = make_case([(9, 33), (3, 70)], dataclasses.replace(ONE_HEAD, num_tokens=16))
    clean = run(case, "hopper", scale=0.25)

    def fill(pages):
        return np.where(np.isnan(pages), jnp.dtype(pages.dtype).type(poison), pages)

    other = dataclasses.replace(case, k_pages=fill(case.k_pages), v_pages=fill(case.v_pages))
    assert np.array_equal(run(other, "hopper", scale=0.25), clean)


def test_copies_do_not_race_with_arithmetic(emulate):
    emulate(HopperTiling(64, 2), detect_races=True)
    check(make_case([(40, 190), (1, 1)], dataclasses.replace(ONE_HEAD, num_tokens=48)), "hopper")
    races: Any = emulator.get_races()
    assert not races.races_found


def test_unseen_pages_are_not_read(emulate):
    """The emulator raises where a read leaves its array."""
    emulate(HopperTiling(64, 2, 1), out_of_bounds_reads="raise")
    shape = dataclasses.replace(ONE_HEAD, num_tokens=32, num_rows=1, table_width=20)
    case = make_case([(32, 232)], shape)  # queries from 200 on; with the window, keys from 181 on
    table = np.full_like(case.page_table, 10**6)
    table[:, 128 // 16 : 240 // 16] = case.page_table[:, 128 // 16 : 240 // 16]
    check_same = run(dataclasses.replace(case, page_table=table), "hopper", scale=0.25, window=20)
    assert np.array_equal(check_same, run(case, "hopper", scale=0.25, window=20))


# (queries, tokens before them) of four rows, of 60 tokens in all; often close to a block's end.
BEFORE = st.integers(0, 300) | st.sampled_from([61, 62, 63, 64, 65, 126, 127, 128, 254, 255])
ROWS = st.lists(st.tuples(st.integers(0, 40), BEFORE), min_size=4, max_size=4).filter(
    lambda rows: sum(queries for queries, _ in rows) <= 60
)


def _plan(window: int | None, tile: int, block: int) -> HopperPlan:
    return HopperPlan(
        num_tokens=60,
        num_rows=4,
        num_heads=64 // tile,
        num_kv_heads=1,
        head_dim=64,
        page_size=16,
        num_items=num_items(60, 4, tile),
        warpgroups=1,
        block=block,
        slots=2,
        scale=1.0,
        window=window,
        soft_cap=None,
        has_sinks=False,
        has_slopes=False,
        has_lse=False,
        is_emulated=True,
    )


PLANS = [_plan(None, 64, 64), _plan(17, 4, 64), _plan(1, 16, 128), _plan(130, 4, 64)]
_work_list = jax.jit(work_list, static_argnums=0)


@settings(deadline=None, max_examples=60)
@given(rows=ROWS, plan=st.sampled_from(PLANS))
def test_items_cover_every_token_once_with_all_its_keys(rows, plan):
    window, block = plan.window, plan.block
    kv_len = [queries + before for queries, before in rows]
    q_start = np.cumsum([0, *(queries for queries, _ in rows)], dtype=np.int32)
    items = np.asarray(_work_list(plan, q_start, np.array(kv_len, np.int32)))
    tokens: list[int] = []
    for item in (HopperItem(*values) for values in items.tolist()):
        of_item = range(item.first, item.first + item.count)
        tokens += of_item
        assert item.begin <= item.whole_begin <= item.whole_end <= item.end
        if item.first >= q_start[-1]:
            assert item.begin == item.end
            continue
        for t in of_item:
            p = kv_len[item.row] - (q_start[item.row + 1] - t)
            assert p == item.position + t - item.first
            oldest = 0 if window is None else max(0, p - window + 1)
            assert item.begin * block <= oldest and p < item.end * block
            assert item.whole_begin >= item.whole_end or (
                oldest <= item.whole_begin * block and item.whole_end * block <= p + 1
            )
        assert not item.count or (item.end - 1) * block < item.position + item.count
    assert tokens == list(range(60))


GPU = {"T": 64, "R": 4, "N": 4, "K": 2, "H": 64, "B": 16, "dtype": jnp.bfloat16, "pages": None}


def _abstract(**changes: Any) -> tuple[Any, ...]:
    s = {**GPU, **changes}
    spec = jax.ShapeDtypeStruct
    i32: Any = lambda *shape: spec(shape, jnp.int32)
    pages = spec((8, s["K"], s["B"], s["H"]), s["pages"] or s["dtype"])
    q = spec((s["T"], s["N"], s["H"]), s["dtype"])
    rows: Any = RaggedRows(i32(s["R"] + 1), i32(s["R"]), i32(s["R"], 8))
    return q, rows, KVPages(pages, pages)  # type: ignore[arg-type]


@contextlib.contextmanager
def _on(kind: str):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        yield


def _lower(arguments: tuple[Any, ...], kind: str = "NVIDIA H200", **options: Any) -> str:
    """Return the kernel in the GPU compiler's dialect; lowering checks the layouts."""
    variant = variant_of(options := {"scale": 0.1, **options})
    call = jax.jit(partial(hopper.paged_attention, **options))
    with _on(kind):
        return call.trace(*arguments, variant).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("sizes", [{}, {"N": 7, "K": 1}, {"H": 128, "B": 64}, {"H": 256}], ids=str)
def test_kernel_lowers_for_a_gpu(sizes):
    arguments = _abstract(**sizes)
    _lower(arguments)
    heads = jnp.ones(arguments[0].shape[1])
    of_heads: Any = {"sinks": heads, "alibi_slopes": heads}
    _lower(arguments, **of_heads, window=20, soft_cap=2.0, return_lse=True)


@pytest.mark.parametrize("sizes", [{}, {"H": 128, "B": 64}, {"H": 256, "B": 64}], ids=str)
def test_largest_candidates_lower_for_a_gpu(sizes):
    """Pallas refuses a kernel that takes more shared memory than a CTA can have."""
    arguments = _abstract(**sizes)
    found = hopper.candidates(*arguments)
    assert len(found) == len(set(found)) > 1
    found.sort(key=lambda tiling: hopper.shared_bytes(tiling, arguments[0].shape[2]))
    for tiling in found[-2:]:
        _lower(arguments, tiling=tiling, return_lse=True)


REFUSALS = {
    "a step of as many rows as tokens holds no chunk: 64 rows, 64 tokens": {"R": 64},
    "queries of float32": {"dtype": jnp.float32},
    "k_pages of int8 for queries of bfloat16": {"pages": jnp.int8},
    "head dim 96": {"H": 96},
    "pages of 4": {"B": 4},
    "128 query heads a KV head": {"N": 128, "K": 1},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_unsupported_calls_are_declined_with_the_reason(reason):
    with pytest.raises(NotImplementedError, match=reason):
        _lower(_abstract(**REFUSALS[reason]))


def test_other_gpus_are_declined():
    with pytest.raises(NotImplementedError, match="NVIDIA A100-SXM4-80GB"):
        _lower(_abstract(), "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    ("version", "is_sound"),
    [("12.6.85", True), ("12.8.93", False), ("12.9.41", False), ("12.9.86", True)],
)
def test_miscompiling_assembler_is_declined(monkeypatch, version, is_sound):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    if is_sound:
        return hopper._check_assembler()
    with pytest.raises(NotImplementedError, match=version):
        hopper._check_assembler()


def test_invalid_tilings_are_refused():
    with pytest.raises(ValueError, match="block is 32; it must be 64, 128 or 256"):
        HopperTiling(32, 2)
    with pytest.raises(ValueError, match="slots is 1"):
        HopperTiling(64, 1)
    with pytest.raises(ValueError, match="warpgroups is 3"):
        HopperTiling(64, 2, 3)
