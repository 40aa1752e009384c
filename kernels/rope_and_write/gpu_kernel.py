"""The Triton kernel of rotary embedding and cache write: one launch for q, k and v.

Program (t, i) takes a block of token t's heads: the first programs of a token queries, the next
keys, the last values. Each reads the token's page and offset. Formula: `api.py`.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check  # a type checker would wrap it, and Triton compiles a function's source
def rope_and_write(
    heads,  # [T, N + 2 K, H]: queries, keys, values
    cos,  # [T, half]
    sin,  # [T, half]
    page,  # [T]
    offset,  # [T]
    num_pages,
    old_k_pages,  # the memory of `k_pages`, and so on
    old_v_pages,
    old_k_scales,
    old_v_scales,
    rotated,  # [T, N, H]
    k_pages,  # [P, K, B, H]
    v_pages,  # [P, K, B, H]
    k_scales,  # [P, K, B]
    v_scales,  # [P, K, B]
    plan: tl.constexpr,
):
    token = tl.program_id(0)
    part = tl.program_id(1)
    cos += token * plan.half
    sin += token * plan.half
    heads += token.to(tl.int64) * (plan.num_heads + 2 * plan.num_kv_heads) * plan.head_dim
    if part < plan.q_blocks:
        rotate_queries(token, part, heads, cos, sin, rotated, plan)
    else:
        index = part - plan.q_blocks
        page_id = tl.load(page + token)
        page_offset = tl.load(offset + token)
        if page_id < num_pages:
            head = (index % plan.kv_blocks) * plan.kv_heads + tl.arange(0, plan.kv_heads)[:, None]
            is_head = head < plan.num_kv_heads
            k = heads + (plan.num_heads + head) * plan.head_dim
            v = k + plan.num_kv_heads * plan.head_dim
            at = (page_id.to(tl.int64) * plan.num_kv_heads + head) * plan.page_size + page_offset
            target = at * plan.head_dim
            if index < plan.kv_blocks:
                move(
                    k, k_pages + target, is_head, cos, sin, k_scales + at,
                    plan.half, plan, plan.largest,
                )  # fmt: skip
            else:
                move(
                    v, v_pages + target, is_head, cos, sin, v_scales + at,
                    0, plan, plan.largest,
                )  # fmt: skip


@triton.jit
@no_type_check
def rotate_queries(
    token,
    part,
    heads,  # the token's
    cos,  # the token's, [half]
    sin,
    rotated,  # [T, N, H]
    plan: tl.constexpr,
):
    head = part * plan.q_heads + tl.arange(0, plan.q_heads)[:, None]
    at = (token.to(tl.int64) * plan.num_heads + head) * plan.head_dim
    source = heads + head * plan.head_dim
    move(source, rotated + at, head < plan.num_heads, cos, sin, rotated, plan.half, plan, 0.0)


@triton.jit
@no_type_check
def move(
    source,  # [heads, 1] pointers to the heads' first numbers
    target,  # [heads, 1] likewise
    is_head,  # [heads, 1]
    cos,  # the token's, [half]
    sin,
    scales,  # [heads, 1] pointers, where `largest` is not 0
    half: tl.constexpr,  # 0: nothing is rotated
    plan: tl.constexpr,
    largest: tl.constexpr,
):
    """Copy heads, rotated where `half` is not 0 and quantized where `largest` is not 0.

    A head is two rotated halves and the rest, each padded to a power of two.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    rest_dim: tl.constexpr = plan.head_dim - 2 * half
    amax = 0.0
    if half > 0:
        lane = tl.arange(0, plan.half_padded)[None]
        is_lane = lane < half
        c = tl.load(cos + lane, is_lane, other=0.0).to(tl.float32)
        s = tl.load(sin + lane, is_lane, other=0.0).to(tl.float32)
        a = tl.load(source + lane, is_head & is_lane, other=0.0).to(tl.float32)
        b = tl.load(source + half + lane, is_head & is_lane, other=0.0).to(tl.float32)
        first = (a * c - b * s).to(dtype).to(tl.float32)
        second = (b * c + a * s).to(dtype).to(tl.float32)
        if largest > 0.0:
            amax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)[:, None]
    if rest_dim > 0:
        rest_padded: tl.constexpr = plan.rest_padded if half > 0 else plan.head_padded
        rest_lane = tl.arange(0, rest_padded)[None]
        is_rest = rest_lane < rest_dim
        from_rest = source + 2 * half + rest_lane
        rest = tl.load(from_rest, is_head & is_rest, other=0.0).to(tl.float32)
        if largest > 0.0:
            amax = tl.maximum(amax, tl.max(tl.abs(rest), 1)[:, None])
    scale = 1.0
    if largest > 0.0:
        scale = tl.where(amax > 0.0, tl.div_rn(amax, largest), 1.0)
        tl.store(scales, scale, is_head)
    if half > 0:
        is_written = is_head & is_lane
        tl.store(target + lane, narrowed(first, scale, target, largest), is_written)
        tl.store(target + half + lane, narrowed(second, scale, target, largest), is_written)
    if rest_dim > 0:
        to_rest = target + 2 * half + rest_lane
        tl.store(to_rest, narrowed(rest, scale, target, largest), is_head & is_rest)


@triton.jit
@no_type_check
def narrowed(x, scale, target, largest: tl.constexpr):
    """Return float32 numbers in the type of `target`, divided by their scale if it is quantized.

    int8 rounds to nearest even: adding 1.5 * 2**23 leaves no bits for a fraction.
    """
    if largest > 0.0:
        x = tl.clamp(tl.div_rn(x, scale), -largest, largest)
        if largest == 127.0:
            x = (x + 12582912.0) - 12582912.0
    return x.to(target.dtype.element_ty)
