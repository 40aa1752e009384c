"""The Triton kernel of the residual sum and norm: a program takes whole tokens. Formula: `api.py`.

A token's numbers stay in registers between the sum and the norm (16384 of them over 16 warps are
32 a thread), so memory is read once. `tl.div_rn` is IEEE division: a quantized value must not
depend on which backend made it.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check  # a checker of types would wrap it, and Triton compiles a function's source
def nearest_even(x):
    """A float32 below 2**22 without its fraction: added, 1.5 * 2**23 leaves no room for one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
@no_type_check  # a checker of types would wrap it, and Triton compiles a function's source
def add_norm(
    x,  # [T, D]
    residual,  # [T, D]
    weight,  # [D]
    bias,  # [D]
    num_tokens,
    normed,  # [T, D]
    total,  # [T, D]
    scales,  # [T, 1]
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # D, up to a power of two
    ROWS: tl.constexpr,  # tokens a program
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    LARGEST: tl.constexpr,  # of the quantized type; 0: not quantized
    IS_INTEGER: tl.constexpr,  # the quantized type
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    lane = tl.arange(0, BLOCK)[None]  # [1, BLOCK]
    is_lane = lane < D
    is_there = is_lane & (token < num_tokens)
    at = token.to(tl.int64) * D + lane
    dtype = x.dtype.element_ty

    wide = tl.load(x + at, is_there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + at, is_there, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        tl.store(total + at, rounded, is_there)
        wide = rounded.to(tl.float32)
    if IS_CENTRED:
        wide = tl.where(is_lane, wide - tl.sum(wide, 1)[:, None] / D, 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / D + EPS)
    factor = tl.load(weight + lane, is_lane, other=0.0).to(tl.float32)
    if IS_CENTRED:
        wide *= factor
        if HAS_BIAS:
            wide += tl.load(bias + lane, is_lane, other=0.0).to(tl.float32)
    elif OFFSET != 0.0:
        wide *= factor + OFFSET
    else:
        wide = wide.to(dtype).to(tl.float32) * factor
    result = wide.to(dtype)
    if LARGEST == 0.0:
        tl.store(normed + at, result, is_there)
    else:
        wide = result.to(tl.float32)
        amax = tl.max(tl.abs(wide), 1)[:, None]
        scale = tl.where(amax > 0.0, tl.div_rn(amax, LARGEST), 1.0)
        values = tl.clamp(tl.div_rn(wide, scale), -LARGEST, LARGEST)
        if IS_INTEGER:
            values = nearest_even(values)
        tl.store(normed + at, values.to(normed.dtype.element_ty), is_there)
        tl.store(scales + token, scale, token < num_tokens)
