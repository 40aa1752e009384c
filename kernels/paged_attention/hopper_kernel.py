"""The body of the Hopper kernel: a CTA computes one unit, an item of queries for one KV head.

One warpgroup copies, the others compute, 64 rows of (token, head of the group) each:

    memory     page ids (GMEM) -> blocks of keys and of values (TMA -> SMEM, `slots` of each)
    compute    scores = q k^T (wgmma) -> online softmax (registers) -> sums += weights v (wgmma)

Barriers of a slot: `full` once all copies of its block have arrived, `free` once all computing
warpgroups have read it. These walk the same blocks, so that they use a slot in step.

Scores are kept in base 2: exp2 is one instruction, exp is two. Masked scores are -inf and the
running maximum starts at a finite floor, so that no row, however little it sees, makes a NaN.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention.hopper_plan import WARPGROUP_ROWS, HopperItem, HopperPlan
from jaxinfer.kernels.paged_attention.hopper_products import SWIZZLE, TILING, Wgmma, emulated

LOG2_E = math.log2(math.e)
FLOOR = -1e30  # below any score; the top of rows that have seen nothing

# Registers a thread, of 64 Ki for three warpgroups: 2 * 128 * 232 + 128 * 40. Compiled for sm_90a,
# nothing is spilled but at head dim 256: 44 bytes.
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40


class HopperScratch(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [warpgroups, 64, H]
    k: Any  # [slots, S, H]
    v: Any  # [slots, S, H]
    out: Any  # [warpgroups, 64, H at once]
    lse: Any  # [warpgroups, 64], or None
    q_full: Any  # barriers [warpgroups]
    k_full: Any  # barriers [slots]
    v_full: Any
    k_free: Any
    v_free: Any
    v_cleared: Any  # one barrier


def scratch_of(plan: HopperPlan, dtype: Any) -> HopperScratch:
    M, S, H = WARPGROUP_ROWS, plan.block, plan.head_dim
    operand = lambda *shape: plgpu.SMEM(shape, dtype, transforms=(TILING, SWIZZLE))
    full = plgpu.Barrier(num_arrivals=plan.pages_a_block, num_barriers=plan.slots)
    free = plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots)
    return HopperScratch(
        q=operand(plan.warpgroups, M, H),
        k=operand(plan.slots, S, H),
        v=operand(plan.slots, S, H),
        out=plgpu.SMEM((plan.warpgroups, M, plan.lanes_at_once), dtype),
        lse=plgpu.SMEM((plan.warpgroups, M), jnp.float32) if plan.has_lse else None,
        q_full=plgpu.Barrier(num_barriers=plan.warpgroups),
        k_full=full,
        v_full=full,
        k_free=free,
        v_free=free,
        v_cleared=plgpu.Barrier(),
    )


class HopperRefs(NamedTuple):
    """Global memory."""

    q: Any  # [K, T*G, H]
    k_pages: Any  # [P, K, B, H]
    v_pages: Any  # [P, K, B, H]
    page_table: Any  # [R, W]
    items: Any  # [items, 8]
    sinks: Any  # [K, 64] float32, in base 2, by a warpgroup's row; or None
    slopes: Any  # [K, 64] float32, in base 2; or None
    out: Any  # [T, N, H]
    lse: Any  # [K, items, warpgroups, 64] float32, or None


def attend(plan: HopperPlan, refs: HopperRefs, scratch: HopperScratch) -> None:
    """Compute one unit. Units of later items come first: in a chunk they see the most."""
    unit, thread = lax.axis_index("unit"), lax.axis_index("warpgroup")
    head = lax.rem(unit, plan.num_kv_heads)
    index = plan.num_items - 1 - lax.div(unit, plan.num_kv_heads)
    item = HopperItem(*(refs.items[index, field] for field in range(len(HopperItem._fields))))

    @pl.when(item.count > 0)
    def _():
        @pl.when(thread < plan.warpgroups)
        def _():
            if plan.warpgroups > 1:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _compute(plan, refs, scratch, item, index, head, thread)

        @pl.when(thread == plan.warpgroups)
        def _():
            if plan.warpgroups > 1:
                plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            _copy(plan, refs, scratch, item, head)


def _copy(
    plan: HopperPlan, refs: HopperRefs, scratch: HopperScratch, item: HopperItem, head
) -> None:
    """Copy the item's blocks, each as soon as its slot is free."""
    S, B = plan.block, plan.page_size
    num_blocks = item.end - item.begin
    last_page = lax.div(item.position + item.count - 1, B)

    def wait(step, slot, free) -> None:
        pl.when(step >= plan.slots)(lambda: plgpu.barrier_wait(free.at[slot]))

    def bring(step, _):
        slot = lax.rem(step, plan.slots)
        first_key = (item.begin + step) * S
        # Past the item's last page the table may hold anything; what is read in place of such a
        # page is masked.
        pages = [
            refs.page_table[item.row, jnp.minimum(lax.div(first_key, B) + i, last_page)]
            for i in range(plan.pages_a_block)
        ]
        inside = pl.ds(lax.rem(first_key, B) if S < B else 0, plan.tokens_a_copy)
        for source, target, full, free in (
            (refs.k_pages, scratch.k, scratch.k_full, scratch.k_free),
            (refs.v_pages, scratch.v, scratch.v_full, scratch.v_free),
        ):
            wait(step, slot, free)
            for i, page in enumerate(pages):
                tokens = pl.ds(i * plan.tokens_a_copy, plan.tokens_a_copy)
                plgpu.copy_gmem_to_smem(
                    source.at[page, head, inside], target.at[slot, tokens], full.at[slot]
                )

    lax.fori_loop(0, num_blocks, bring, None)

    def drain(step, _):
        for free in (scratch.k_free, scratch.v_free):
            wait(step, lax.rem(step, plan.slots), free)

    lax.fori_loop(num_blocks, num_blocks + plan.slots, drain, None)


class QueryRows(NamedTuple):
    """What the scores of a warpgroup's rows depend on."""

    position: Any  # [64] int32
    slope: Any  # [64] float32, or None


class State(NamedTuple):
    """The running sums of the online softmax, before the division."""

    top: jax.Array  # [64] largest score
    total: jax.Array  # [64]
    sums: jax.Array  # [64, H]


def _compute(
    plan: HopperPlan,
    refs: HopperRefs,
    scratch: HopperScratch,
    item: HopperItem,
    index,
    head,
    thread,
) -> None:
    """Compute a warpgroup's share of the item: its tokens, all heads of the group."""
    ops = emulated if plan.is_emulated else Wgmma
    M, G = WARPGROUP_ROWS, plan.group
    first = item.first + thread * plan.share
    count = jnp.clip(item.count - thread * plan.share, 0, plan.share)
    # Rows past the last token belong to other items or to none: computed, not stored.
    plgpu.copy_gmem_to_smem(
        refs.q.at[head, pl.ds(first * G, M)], scratch.q.at[thread], scratch.q_full.at[thread]
    )
    row = ops.iota((M,), 0, ops.vector)
    position = item.position + thread * plan.share + lax.div(row, jnp.int32(G))
    rows = QueryRows(position, ops.load_rows(refs.slopes, head) if plan.has_slopes else None)
    full = lambda shape, value, layout: ops.place(jnp.full(shape, value, jnp.float32), layout)
    state = State(
        top=ops.load_rows(refs.sinks, head) if plan.has_sinks else full((M,), FLOOR, ops.vector),
        total=full((M,), 1.0 if plan.has_sinks else 0.0, ops.vector),
        sums=full((M, plan.head_dim), 0.0, ops.matrix),
    )
    plgpu.barrier_wait(scratch.q_full.at[thread])
    step = partial(_step, plan, ops, scratch, item, rows, thread)
    cut, whole = partial(step, is_cut=True), partial(step, is_cut=False)
    if plan.window is not None:
        state = lax.fori_loop(item.begin, item.whole_begin, cut, state)
    state = lax.fori_loop(item.whole_begin, item.whole_end, whole, state)
    state = lax.fori_loop(item.whole_end, item.end, cut, state)
    _store(plan, ops, refs, scratch, state, (index, head, thread), (first, count))


def _step(
    plan: HopperPlan,
    ops: Any,
    scratch: HopperScratch,
    item: HopperItem,
    rows: QueryRows,
    thread: jax.Array,
    block: jax.Array,
    state: State,
    *,
    is_cut: bool,
) -> State:
    """Add one block to the online softmax."""
    q = scratch.q.at[thread]
    slot = lax.rem(block - item.begin, plan.slots)
    plgpu.barrier_wait(scratch.k_full.at[slot])
    scores = ops.scores(q, scratch.k.at[slot])
    plgpu.barrier_arrive(scratch.k_free.at[slot])
    scores = _modified(plan, ops, scores, rows, block * plan.block, is_cut)
    across = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp2(scores - across(top, scores.shape))
    shrink = jnp.exp2(state.top - top)
    total = state.total * shrink + weights.sum(axis=1)
    sums = state.sums * across(shrink, state.sums.shape)
    plgpu.barrier_wait(scratch.v_full.at[slot])
    v = scratch.v.at[slot]
    if is_cut:
        # A weight of 0 times NaN is NaN, and slots past the row's last token may hold one.
        @pl.when(block == item.end - 1)
        def _():
            @pl.when(thread == 0)
            def _():
                ops.clear_keys(v, item.position + item.count - block * plan.block)
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch.v_cleared)

            plgpu.barrier_wait(scratch.v_cleared)

    sums = ops.accumulate(sums, weights.astype(q.dtype), v)
    plgpu.barrier_arrive(scratch.v_free.at[slot])
    return State(top, total, sums)


def _modified(plan: HopperPlan, ops: Any, scores, rows: QueryRows, first_key, is_cut: bool):
    """Return the formula's scores times log2(e); -inf where a query does not see the key."""
    if plan.soft_cap is None:
        scores = scores * (plan.scale * LOG2_E)
    else:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): the GPU's own tanh is right to 11 bits only.
        power = jnp.exp2(scores * (2 * LOG2_E * plan.scale / plan.soft_cap))
        scores = plan.soft_cap * LOG2_E * (1 - 2 / (1 + power))
    if not (is_cut or plan.has_slopes):
        return scores
    across = lambda x: lax.broadcast_in_dim(x, scores.shape, [0])
    # How far the key is behind the query: 0 is the query's own, below 0 comes after it.
    behind = across(rows.position - first_key) - ops.iota(scores.shape, 1, ops.matrix)
    if plan.has_slopes:
        scores = scores - across(rows.slope) * behind.astype(jnp.float32)
    if is_cut:
        is_seen = behind >= 0
        if plan.window is not None:
            is_seen &= behind < plan.window
        scores = jnp.where(is_seen, scores, -jnp.inf)
    return scores


def _store(
    plan: HopperPlan, ops: Any, refs: HopperRefs, scratch: HopperScratch, state: State, unit, tokens
) -> None:
    """Divide, and write token by token: a box of all rows would overwrite other items' tokens."""
    (index, head, thread), (first, count), G = unit, tokens, plan.group
    total = jnp.where(state.total == 0, 1.0, state.total)  # 0 where a row sees nothing
    result = state.sums * lax.broadcast_in_dim(1 / total, state.sums.shape, [0])
    if plan.has_lse:
        lse = state.top * (1 / LOG2_E) + jnp.log(state.total)
        ops.store(scratch.lse.at[thread], lse)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.lse.at[thread], refs.lse.at[head, index, thread])
    for lane in range(0, plan.head_dim, plan.lanes_at_once):
        lanes = slice(lane, lane + plan.lanes_at_once)
        ops.store(scratch.out.at[thread], result[:, lanes].astype(scratch.out.dtype))
        plgpu.commit_smem()

        def write(i, _, lanes=lanes):
            plgpu.copy_smem_to_gmem(
                scratch.out.at[thread, pl.ds(i * G, G)],
                refs.out.at[first + i, pl.ds(head * G, G), lanes],
            )

        lax.fori_loop(0, count, write, None)
        plgpu.wait_smem_to_gmem(0)
