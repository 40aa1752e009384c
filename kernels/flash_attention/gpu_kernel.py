"""The Triton kernel of flash attention: one program is one tile of queries of one head.

A program walks first the tiles of keys that need no mask, then those that do. Which ones follows
from the positions, or is read from lists (`blocks.TileWalk`) where a mask is given as arrays. A
head dimension is cut into two powers of two (80 = 64 + 16), so that nothing is padded. `plan` is
`gpu.GpuFlashPlan`, M its q_tile, B its k_tile, H0 its half, H1 its rest_lanes.

Scores are kept in base 2: `top` is the largest of z * log2(e), `total` the sum of exp2 below it.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below any score, and finite: exp2(-inf - LOWEST) is 0 where -inf for both would give NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
@no_type_check  # a type checker would wrap it, and Triton compiles a function's source
def flash_attention(
    q_ptr,  # [R, T, N, H]
    k_ptr,  # [R, S, K, H]
    v_ptr,  # [R, S, K, H]
    offset_ptr,  # [R]
    length_ptr,  # [R]
    sink_ptr,  # [N], if has_sinks
    slope_ptr,  # [N], if has_slopes
    start_ptr,  # [R, C, S], if there are intervals
    end_ptr,  # [R, C, S]
    num_whole_ptr,  # [R or 1, N or 1, TQ], if has_lists
    num_tiles_ptr,  # [R or 1, N or 1, TQ]
    tile_ptr,  # [R or 1, N or 1, TQ, TK]
    T,
    S,
    scale,
    out_ptr,  # [R, T, N, H]
    lse_ptr,  # [R, N, T]
    plan: tl.constexpr,
):
    # The last queries of a causal call have the most to do; they start first.
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2)
    wide_row = row.to(tl.int64)
    first = tl.load(offset_ptr + row) + i * plan.q_tile  # position of the tile's first query
    length = tl.load(length_ptr + row)
    queries_at = (wide_row * T * plan.heads + head) * plan.head_dim
    keys_at = (wide_row * S * plan.kv_heads + head // plan.group) * plan.head_dim
    k_ptr += keys_at
    v_ptr += keys_at
    if plan.intervals > 0:
        start_ptr += wide_row * plan.intervals * S
        end_ptr += wide_row * plan.intervals * S
    slope = tl.load(slope_ptr + head) if plan.has_slopes else 0.0
    q0, q1 = _queries(q_ptr + queries_at, i, T, plan)
    top, total, acc0, acc1 = _nothing_seen(sink_ptr, head, plan)
    low, whole_low, num_whole, num_tiles = _bounds(first, i, length, T, plan)
    if plan.has_lists:
        unit = (row if plan.row_lists else 0) * (plan.heads if plan.head_lists else 1)
        unit = (unit + (head if plan.head_lists else 0)) * tl.num_programs(0) + i
        num_whole, num_tiles = tl.load(num_whole_ptr + unit), tl.load(num_tiles_ptr + unit)
        tile_ptr += unit * tl.cdiv(S, plan.k_tile)
    for n in range(0, num_whole):
        j = tl.load(tile_ptr + n) if plan.has_lists else whole_low + n
        top, total, acc0, acc1 = _step(
            top, total, acc0, acc1, q0, q1, k_ptr, v_ptr, j, row, head, first, length, slope,
            start_ptr, end_ptr, S, scale, plan, False,
        )  # fmt: skip
    for n in range(num_whole, num_tiles):
        j = tl.load(tile_ptr + n) if plan.has_lists else _cut(n, low, whole_low, num_whole)
        top, total, acc0, acc1 = _step(
            top, total, acc0, acc1, q0, q1, k_ptr, v_ptr, j, row, head, first, length, slope,
            start_ptr, end_ptr, S, scale, plan, True,
        )  # fmt: skip
    lse_ptr += (wide_row * plan.heads + head) * T
    _store(out_ptr + queries_at, lse_ptr, top, total, acc0, acc1, i, T, plan)


@triton.jit
@no_type_check
def _queries(q_ptr, i, T, plan: tl.constexpr):
    """Load a head's tile in two parts: [M, H0], [M, H1]."""
    t = i * plan.q_tile + tl.arange(0, plan.q_tile)[:, None]
    at = t * (plan.heads * plan.head_dim)
    q0 = tl.load(q_ptr + at + tl.arange(0, plan.half)[None], t < T, 0.0)
    q1 = q0  # an unused second part costs nothing
    if plan.rest > 0:
        q1 = tl.load(q_ptr + at + plan.half + tl.arange(0, plan.rest)[None], t < T, 0.0)
    return q0, q1


@triton.jit
@no_type_check
def _nothing_seen(sink_ptr, head, plan: tl.constexpr):
    """Return top [M], total [M], acc [M, H0], [M, H1]; a sink is one more score, without a
    value."""
    if plan.has_sinks:
        top = tl.full([plan.q_tile], 0.0, tl.float32) + tl.load(sink_ptr + head) * LOG2_E
        total = tl.full([plan.q_tile], 1.0, tl.float32)
    else:
        top = tl.full([plan.q_tile], LOWEST, tl.float32)
        total = tl.full([plan.q_tile], 0.0, tl.float32)
    acc0 = tl.full([plan.q_tile, plan.half], 0.0, tl.float32)
    return top, total, acc0, tl.full([plan.q_tile, plan.rest_lanes], 0.0, tl.float32)


@triton.jit
@no_type_check
def _bounds(first, i, length, T, plan: tl.constexpr):
    """Return the first tile of keys that may be seen, the first that needs no mask, the number of
    tiles that need none, the number of all."""
    last = first + tl.minimum(plan.q_tile, T - i * plan.q_tile) - 1
    low, high = 0, tl.cdiv(length, plan.k_tile)
    whole_low, whole_high = 0, length // plan.k_tile
    if plan.causal:
        high = tl.minimum(high, tl.cdiv(tl.maximum(last + 1, 0), plan.k_tile))
        whole_high = tl.minimum(whole_high, tl.maximum(first + 1, 0) // plan.k_tile)
    if plan.window is not None:
        low = tl.maximum(first - plan.window + 1, 0) // plan.k_tile
        whole_low = tl.cdiv(tl.maximum(last - plan.window + 1, 0), plan.k_tile)
        if not plan.causal:
            high = tl.minimum(high, tl.cdiv(tl.maximum(last + plan.window, 0), plan.k_tile))
            within = tl.maximum(first + plan.window, 0) // plan.k_tile
            whole_high = tl.minimum(whole_high, within)
    high = tl.maximum(high, low)
    whole_low = tl.minimum(tl.maximum(whole_low, low), high)
    num_whole = tl.maximum(tl.minimum(whole_high, high) - whole_low, 0)
    if plan.mask_mod is not None:
        num_whole = 0
    return low, whole_low, num_whole, high - low


@triton.jit
@no_type_check
def _cut(n, low, whole_low, num_whole):
    """Return the n-th cut tile: those before the whole ones, then those after."""
    j = low + n - num_whole
    return tl.where(j < whole_low, j, j + num_whole)


@triton.jit
@no_type_check
def _step(
    top, total, acc0, acc1, q0, q1,  # as `_nothing_seen` and `_queries` give them
    k_ptr, v_ptr,  # [S, K, H] from the KV head on
    j, row, head, first, length, slope,
    start_ptr, end_ptr,  # [C, S] of the row
    S, scale, plan: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running softmax (arXiv:2205.14135)."""
    s = j * plan.k_tile + tl.arange(0, plan.k_tile)
    at0 = s[:, None] * (plan.kv_heads * plan.head_dim) + tl.arange(0, plan.half)[None]
    at1 = s[:, None] * (plan.kv_heads * plan.head_dim) + plan.half
    at1 += tl.arange(0, plan.rest_lanes)[None]
    k0 = _keys(k_ptr + at0, s, length, IS_CUT)
    z = tl.dot(q0, tl.trans(k0), input_precision=plan.precision)
    if plan.rest > 0:
        k1 = _keys(k_ptr + at1, s, length, IS_CUT)
        z = tl.dot(q1, tl.trans(k1), z, input_precision=plan.precision)
    p = (first + tl.arange(0, plan.q_tile))[:, None]
    z = _scores(z, row, head, p, s[None], slope, scale, plan)
    if IS_CUT:
        seen = _seen(row, head, p, s[None], length, start_ptr, end_ptr, S, plan)
        z = tl.where(seen, z, float("-inf"))
    new_top = tl.maximum(top, tl.max(z, 1))
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(z - new_top[:, None])
    total = total * fade + tl.sum(weight, 1)
    weight = weight.to(q0.dtype)
    v0 = _keys(v_ptr + at0, s, length, IS_CUT)
    acc0 = tl.dot(weight, v0, acc0 * fade[:, None], input_precision=plan.precision)
    if plan.rest > 0:
        v1 = _keys(v_ptr + at1, s, length, IS_CUT)
        acc1 = tl.dot(weight, v1, acc1 * fade[:, None], input_precision=plan.precision)
    return new_top, total, acc0, acc1


@triton.jit
@no_type_check
def _keys(pointers, s, length, IS_CUT: tl.constexpr):
    """Load keys or values, zeros past the length: 0 times what is stored there could be NaN."""
    if IS_CUT:
        return tl.load(pointers, (s < length)[:, None], 0.0)
    else:
        return tl.load(pointers)


@triton.jit
@no_type_check
def _scores(z, row, head, p, s, slope, scale, plan: tl.constexpr):
    """Return the scores that go into the softmax, times log2(e): [M, B]."""
    if plan.has_plain_scores:
        return z * (scale * LOG2_E)
    else:
        z = z * scale
        if plan.soft_cap is not None:
            z = plan.soft_cap * (1.0 - 2.0 / (tl.exp(z * (2.0 / plan.soft_cap)) + 1.0))  # tanh
        if plan.has_slopes:
            z = z - slope * tl.abs(p - s).to(tl.float32)
        if plan.score_mod is not None:
            z = plan.score_mod(z, row, head, p, s)
        return z * LOG2_E


@triton.jit
@no_type_check
def _seen(row, head, p, s, length, start_ptr, end_ptr, S, plan: tl.constexpr):
    """Return whether queries see keys: [M, B], or a shape that broadcasts to it."""
    seen = s < length
    if plan.causal:
        seen = seen & (s <= p)
    if plan.window is not None:
        seen = seen & (s > p - plan.window)
        if not plan.causal:
            seen = seen & (s < p + plan.window)
    C: tl.constexpr = plan.intervals
    for c in tl.static_range(C):
        start = tl.load(start_ptr + c * S + s, s < length, 0)
        end = tl.load(end_ptr + c * S + s, s < length, 0)
        seen = seen & ((p < start) | (p >= end))
    if plan.mask_mod is not None:
        seen = seen & plan.mask_mod(row, head, p, s)
    return seen


@triton.jit
@no_type_check
def _store(out_ptr, lse_ptr, top, total, acc0, acc1, i, T, plan: tl.constexpr):
    t = i * plan.q_tile + tl.arange(0, plan.q_tile)
    is_query = (t < T)[:, None]
    sum_or_one = tl.where(total == 0, 1.0, total)
    share = (1.0 / sum_or_one)[:, None]
    at = t[:, None] * (plan.heads * plan.head_dim)
    out0 = (acc0 * share).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at + tl.arange(0, plan.half)[None], out0, is_query)
    if plan.rest > 0:
        out1 = (acc1 * share).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at + plan.half + tl.arange(0, plan.rest)[None], out1, is_query)
    lse = tl.where(total > 0, (top + tl.log2(sum_or_one)) * LN_2, float("-inf"))
    tl.store(lse_ptr + t, lse, t < T)
