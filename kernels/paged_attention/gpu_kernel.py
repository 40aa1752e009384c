"""The Triton kernel of paged attention: a persistent grid over the blocks of all units.

A program's stretch of the sequence may begin and end inside a unit. The parts of a unit that is cut
leave their sums in `partial` and `state`; the program that finishes the last of them, known by a
counter, merges them. No program waits for another, so the grid may be larger than what the
device holds at once. Vocabulary: `gpu_plan.py`; what is done with a run of blocks: `gpu_walk.py`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from jaxinfer.kernels.paged_attention.gpu_walk import LOG2_E, lanes_of, rows_of, walk

LN_2 = tl.constexpr(0.6931471805599453)

# Triton takes only constexpr globals; the order is that of `gpu_plan`.
FIRST = tl.constexpr(1)
COUNT = tl.constexpr(2)
POSITION = tl.constexpr(3)
BLOCK = tl.constexpr(4)
NUM_BLOCKS = tl.constexpr(5)
END = tl.constexpr(6)


@triton.jit
@no_type_check  # a type checker would wrap it, and Triton compiles a function's source
def paged_attention_kernel(
    q,  # [T, N, H]
    k_pages,  # [P, K, B, H]
    v_pages,  # [P, K, B, H]
    k_scales,  # [P, K, B]
    v_scales,  # [P, K, B]
    sinks,  # [N]
    slopes,  # [N]
    q_start,  # [R+1]
    page_table,  # [R, W]
    items,  # [7, items]
    zeros,  # [programs], the memory of `counters`
    out,  # [T, N, H]
    lse,  # [T, N]
    partial,  # [programs, 2, row_block, lanes]
    state,  # [programs, 2, 2, row_block]: top, total
    counters,  # [programs]: finished parts of the unit that was begun by a program and cut
    plan: tl.constexpr,
):
    program, scales, outs = tl.program_id(0), (k_scales, v_scales), (sinks, out, lse)
    _clear_padding(program, q_start, out, lse, plan)
    index = tl.arange(0, plan.items_padded)
    ends = tl.load(items + END * plan.num_items + index, mask=index < plan.num_items, other=0)
    total = tl.max(ends, axis=0) * plan.num_kv_heads
    active = tl.maximum(tl.minimum(total, plan.programs), 1)
    at = share_start(tl.minimum(program, active), active, total)
    end = share_start(tl.minimum(program + 1, active), active, total)
    is_before = (index < plan.num_items) & (ends <= at // plan.num_kv_heads)
    item = tl.sum(is_before.to(tl.int32), axis=0)
    while at < end:
        item_end = tl.load(items + END * plan.num_items + item) * plan.num_kv_heads
        num_blocks = tl.load(items + NUM_BLOCKS * plan.num_items + item)
        inside = at - (item_end - num_blocks * plan.num_kv_heads)
        head = inside // num_blocks
        unit_start = at - inside % num_blocks
        unit_end = unit_start + num_blocks
        is_mine = True if plan.is_split else at == unit_start
        stop = tl.minimum(unit_end, end) if plan.is_split else unit_end
        if is_mine:
            row, first_block, first, count, position = _fields(items + item, plan)
            blocks = (first_block - unit_start + at, first_block - unit_start + stop)
            table = page_table + row * plan.table_width
            unit = (head, first, count, position)
            sums = walk(q, (k_pages, v_pages), scales, slopes, table, unit, blocks, plan)
            if (at == unit_start) & (stop == unit_end):
                _store(sums, outs, unit, 0, plan)
            else:
                slot = 2 * program + (at == unit_start).to(tl.int32)
                _store_part(sums, partial, state, slot, plan)
                begun_by = program_at(unit_start, active, total)
                num_parts = program_at(unit_end - 1, active, total) - begun_by + 1
                parts = (partial, state, begun_by, num_parts)
                _count_part(parts, counters + begun_by, outs, unit, plan)
        at = stop
        item += (at == item_end).to(tl.int32)


@triton.jit
@no_type_check
def _fields(item, plan: tl.constexpr):
    """Return an item's row, first block, first token, number of tokens and position, by the address
    of its first field."""
    row = tl.load(item)
    first_block = tl.load(item + BLOCK * plan.num_items)
    first = tl.load(item + FIRST * plan.num_items)
    count = tl.load(item + COUNT * plan.num_items)
    return row, first_block, first, count, tl.load(item + POSITION * plan.num_items)


@triton.jit
@no_type_check
def _count_part(parts, counter, outs, item, plan: tl.constexpr):
    """Count a stored part; the program that stored the last one merges all, some lanes at a time,
    and resets the counter."""
    partial, state, begun_by, num_parts = parts
    # Every thread's share is written before the one that counts the part releases them all.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        for lane in range(0, plan.lanes, plan.merged_lanes):
            sums = _merge((partial, state), begun_by, num_parts, lane, plan)
            _store(sums, outs, item, lane, plan)
        tl.store(counter, 0)


@triton.jit
@no_type_check
def share_start(program, active, total):
    """Return where a program's stretch begins.

    `program * total` does not fit 32 bits: 528 programs and 4.2e6 blocks (256 rows of 128 Ki
    tokens, 8 heads, blocks of 64) make 2.2e9.
    """
    return (program.to(tl.int64) * total // active).to(tl.int32)


@triton.jit
@no_type_check
def program_at(block, active, total):
    """Return the program whose stretch has a block: the last p with p * total // active <=
    block."""
    return (((block.to(tl.int64) + 1) * active - 1) // total).to(tl.int32)


@triton.jit
@no_type_check
def _clear_padding(program, q_start, out, lse, plan: tl.constexpr):
    """Write zeros, and -inf for lse, for tokens of no row; each program takes some."""
    lane = tl.arange(0, 1024)
    for token in range(tl.load(q_start + plan.num_rows) + program, plan.num_tokens, plan.programs):
        row_len = plan.num_heads * plan.head_dim
        for base in range(0, row_len, 1024):
            at = token * row_len + base + lane
            tl.store(
                out + at, tl.full((1024,), 0.0, out.dtype.element_ty), mask=base + lane < row_len
            )
        if plan.has_lse:
            low = tl.full((1024,), float("-inf"), tl.float32)
            tl.store(lse + token * plan.num_heads + lane, low, mask=lane < plan.num_heads)


@triton.jit
@no_type_check
def _store(walked, outs, item, lane, plan: tl.constexpr):
    """Store the result of an item and KV head, or its lanes from `lane` on."""
    acc, top, sums = walked
    sinks, out, lse = outs
    _, out_row, is_row = rows_of(item, plan)
    offsets, is_lane = lanes_of(out_row, is_row, lane, acc.shape[1], plan)
    if plan.has_sinks:
        sink = tl.load(sinks + out_row % plan.num_heads, mask=is_row, other=0.0) * LOG2_E
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        sums = sums * fade + tl.exp2(sink - new_top)
        acc *= fade[:, None]
        top = new_top
    sums = tl.where(is_row, sums, 1.0)
    tl.store(out + offsets, (acc / sums[:, None]).to(out.dtype.element_ty), mask=is_lane)
    if plan.has_lse:
        tl.store(lse + out_row, (top + tl.log2(sums)) * LN_2, mask=is_row)


@triton.jit
@no_type_check
def _part(slot, first_lane, num_lanes: tl.constexpr, plan: tl.constexpr):
    """Return the offsets of a part: its sums [row_block, num_lanes], its top [row_block]; the total
    follows the top."""
    row = tl.arange(0, plan.row_block)
    lane = first_lane + tl.arange(0, num_lanes)
    sums = (slot * plan.row_block + row)[:, None] * plan.lanes + lane[None, :]
    return sums, slot * (2 * plan.row_block) + row


@triton.jit
@no_type_check
def _store_part(walked, partial, state, slot, plan: tl.constexpr):
    acc, top, sums = walked
    sums_at, top_at = _part(slot, 0, plan.lanes, plan)
    tl.store(partial + sums_at, acc)
    tl.store(state + top_at, top)
    tl.store(state + top_at + plan.row_block, sums)


@triton.jit
@no_type_check
def _merge(parts, begun_by, num_parts, lane, plan: tl.constexpr):
    """Return the merged sums of a unit's parts: acc of the lanes from `lane` on, top, sums.

    Reads bypass the first level of cache, which does not see other programs' writes.
    """
    partial, state = parts
    num_lanes: tl.constexpr = plan.merged_lanes
    at_once: tl.constexpr = plan.merged_at_once
    top = tl.full((plan.row_block,), float("-inf"), tl.float32)
    sums = tl.full((plan.row_block,), 0.0, tl.float32)
    acc = tl.full((plan.row_block, num_lanes), 0.0, tl.float32)
    for base in range(0, num_parts, at_once):
        for step in tl.static_range(at_once):
            part = base + step
            is_part = part < num_parts
            # The unit begins in the second half of its first program's memory (`slot`).
            slot = 2 * (begun_by + part) + (part == 0).to(tl.int32)
            sums_at, top_at = _part(slot, lane, num_lanes, plan)
            part_top = tl.load(
                state + top_at, mask=is_part, other=float("-inf"), cache_modifier=".cg"
            )
            part_sums = tl.load(
                state + top_at + plan.row_block, mask=is_part, other=0.0, cache_modifier=".cg"
            )
            part_acc = tl.load(partial + sums_at, mask=is_part, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, part_top)
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade = tl.exp2(top - finite)
            gain = tl.exp2(part_top - finite)
            sums = sums * fade + part_sums * gain
            acc = acc * fade[:, None] + part_acc * gain[:, None]
            top = new_top
    return acc, top, sums
