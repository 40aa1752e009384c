"""The walk of the Triton kernel of paged attention: one item and KV head over a run of its blocks.

Scores are kept in base 2: `top` is the largest of z * log2(e), `sums` those of exp2 below it.
Vocabulary: `gpu_plan.py`; the division of the work: `gpu_kernel.py`; formula: `api.py`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check  # a type checker would wrap it, and Triton compiles a function's source
def rows_of(item, plan: tl.constexpr):
    """Return, for the rows of a tile, the token in the tile, token * N + head, and whether the row
    is used."""
    head, first, count, _ = item
    row = tl.arange(0, plan.row_block)
    token = row // plan.group
    out_row = (first + token) * plan.num_heads + head * plan.group + row % plan.group
    return token, out_row, token < tl.minimum(count, plan.tile)


@triton.jit
@no_type_check
def lanes_of(out_row, is_row, first_lane, num_lanes: tl.constexpr, plan: tl.constexpr):
    """Return offsets [row_block, num_lanes] into [T, N, H], and which of them exist."""
    lane = first_lane + tl.arange(0, num_lanes)
    offsets = out_row[:, None] * plan.head_dim + lane[None, :]
    return offsets, is_row[:, None] & (lane < plan.head_dim)[None, :]


@triton.jit
@no_type_check
def walk(q, pages, scales, slopes, table, item, blocks, plan: tl.constexpr):
    """Return the sums of an item's rows over the blocks [first, end) of a KV head: acc, top, sums.

    `table` [W] is the page table of the item's row; an item is (head, first token, count, position
    of the first).
    """
    k_pages, v_pages = pages
    k_scales, v_scales = scales
    head, _, count, position = item
    first_block, end_block = blocks
    token, out_row, is_row = rows_of(item, plan)
    offsets, is_lane = lanes_of(out_row, is_row, 0, plan.lanes, plan)
    compute = tl.float32 if plan.is_wide else q.dtype.element_ty
    q_rows = tl.load(q + offsets, mask=is_lane, other=0.0).to(compute)
    at = position + token  # [row_block]
    slope = tl.full((plan.row_block,), 0.0, tl.float32)
    if plan.has_slopes:
        slope = tl.load(slopes + out_row % plan.num_heads, mask=is_row, other=0.0) * LOG2_E
    lane = tl.arange(0, plan.lanes)
    top = tl.full((plan.row_block,), float("-inf"), tl.float32)
    sums = tl.full((plan.row_block,), 0.0, tl.float32)
    acc = tl.full((plan.row_block, plan.lanes), 0.0, tl.float32)
    # Loaded a step ahead of its use: a load that waits for one in the same step is not prefetched.
    page = _pages(table, first_block, position, count, plan)
    for block in tl.range(first_block, end_block, num_stages=plan.stages):
        next_page = _pages(table, block + 1, position, count, plan)
        s = block * plan.block + tl.arange(0, plan.block)
        is_read = _is_read(s, position, count, plan)
        base, offset = _slot_offsets(page, block, head, plan)
        numbers = offset[:, None] * plan.head_dim + lane[None, :]
        mask = is_read[:, None] & (lane < plan.head_dim)[None, :]
        k = tl.load(k_pages + base * plan.head_dim + numbers, mask=mask, other=0)
        z = tl.dot(q_rows, tl.trans(_unpack(k, compute, plan)), input_precision=plan.precision)
        if plan.has_scales:
            z *= tl.load(k_scales + base + offset, mask=is_read, other=0.0)[None, :]
        z = _scores(z, plan)
        if plan.has_slopes:
            z += slope[:, None] * (s[None, :] - at[:, None]).to(tl.float32)
        is_seen = (s[None, :] <= at[:, None]) & is_read[None, :]
        if plan.window is not None:
            is_seen &= s[None, :] > at[:, None] - plan.window
        z = tl.where(is_seen, z, float("-inf"))
        weight, fade, top = _weights(z, top)
        sums = sums * fade + tl.sum(weight, axis=1)
        if plan.has_scales:
            weight *= tl.load(v_scales + base + offset, mask=is_read, other=0.0)[None, :]
        v = tl.load(v_pages + base * plan.head_dim + numbers, mask=mask, other=0)
        v = _unpack(v, compute, plan)
        acc = tl.dot(weight.to(compute), v, acc * fade[:, None], input_precision=plan.precision)
        page = next_page
    return acc, top, sums


@triton.jit
@no_type_check
def _is_read(s, position, count, plan: tl.constexpr):
    """Return whether any query of the item sees a token; others may hold anything, and 0 * NaN is
    NaN."""
    if plan.window is not None:
        return (s < position + count) & (s > position - plan.window)
    else:
        return s < position + count


@triton.jit
@no_type_check
def _pages(table, block, position, count, plan: tl.constexpr):
    """Return the page of a block that lies in one, a scalar; otherwise the page of each of its
    tokens. 0 where the item sees nothing."""
    if plan.page_size % plan.block == 0:
        start = block * plan.block
        page = tl.load(table + start // plan.page_size, mask=start < position + count, other=0)
    else:
        s = block * plan.block + tl.arange(0, plan.block)
        is_read = _is_read(s, position, count, plan)
        page = tl.load(table + s // plan.page_size, mask=is_read, other=0)
    return page.to(tl.int64)


@triton.jit
@no_type_check
def _slot_offsets(page, block, head, plan: tl.constexpr):
    """Return the tokens of a block as indices into [P * K * B]: a base of 64 bits, and what to add.

    For a block inside one page only the base, one scalar, changes from step to step.
    """
    step = tl.arange(0, plan.block)
    start = block * plan.block
    if plan.page_size % plan.block == 0:
        base = (page * plan.num_kv_heads + head) * plan.page_size + start % plan.page_size
        offset = step
    else:
        base = tl.full((), 0, tl.int64)
        offset = (page * plan.num_kv_heads + head) * plan.page_size
        offset += (start + step) % plan.page_size
    return base, offset


@triton.jit
@no_type_check
def _unpack(stored, compute: tl.constexpr, plan: tl.constexpr):
    """Return stored numbers as operands of a product.

    float8_e4m3fn is converted by its bits, since compute capability 8.0 has no such type: sign,
    exponent and fraction are put at their places in a float16, whose exponent bias is 15, not 7.
    """
    if plan.is_fp8:
        bits = stored.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(compute)
    if plan.has_scales:  # int8 is converted to bfloat16 by way of float32 in any case
        return stored.to(tl.float32).to(compute)
    return stored.to(compute)


@triton.jit
@no_type_check
def _scores(z, plan: tl.constexpr):
    """Return z * log2(e), before masks and slopes, of products q . k."""
    if plan.soft_cap is not None:
        # tanh(|x|) = (1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow
        e = tl.exp2(tl.abs(z) * (-2.0 * plan.scale / plan.soft_cap * LOG2_E))
        capped = (1.0 - e) / (1.0 + e) * (plan.soft_cap * LOG2_E)
        return tl.where(z < 0.0, -capped, capped)
    return z * (plan.scale * LOG2_E)


@triton.jit
@no_type_check
def _weights(z, top):
    """Return exp2 relative to the new top, the factor that earlier sums fade by, and the new top.

    A row that has seen nothing has a top of -inf, from which nothing may be subtracted.
    """
    new_top = tl.maximum(top, tl.max(z, axis=1))
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    return tl.exp2(z - finite[:, None]), tl.exp2(top - finite), new_top
