"""The Triton kernel of the product with a quantized weight.

A program computes a tile of the result, or a split's part of it, over its share of the rows.
Four-bit values are loaded as bytes: a tile of byte rows is two tiles of weights, multiplied with
two tiles of x. Values stay exact in the operands' type (int8 and 4 bits fit bfloat16's and
float16's mantissa, float8 fits both) unless the weights are scaled before the product.

SCALING is where a group's scale is applied:

    "end"     one group a column: to the sums, when they are complete
    "sums"    to the sums of each tile of rows, which lies in one group
    "weights" to the weights, before the product

(`no_type_check`: Triton's interpreter finds a function's globals in the function itself, not in a
checker's wrapper around it.)
"""

from typing import no_type_check

import triton
import triton.language as tl

# Added and subtracted, it leaves a float32 below 2 ** 22 rounded to an integer, half to even.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
@no_type_check
def _float8_values(raw):
    """Return float8_e4m3fn, given as bytes, in float32, for chips without the type.

    NaN is read as 480. The bits are put at their places in a float16, whose exponent bias is 8
    more.
    """
    wide = raw.to(tl.uint16)
    bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
@no_type_check
def _tile_of(program, T, F, BT: tl.constexpr, BF: tl.constexpr, BAND: tl.constexpr):
    """Return the tile of tokens and the tile of columns: a band of BAND tiles of tokens at a time,
    columns slowest."""
    token_tiles, column_tiles = tl.cdiv(T, BT), tl.cdiv(F, BF)
    band = program // (BAND * column_tiles)
    first = band * BAND
    height = tl.minimum(token_tiles - first, BAND)
    within = program % (BAND * column_tiles)
    return first + within % height, within // height


@triton.jit
@no_type_check
def _product(x, w, sums):
    """Return sums + x @ w.

    For float8, Hopper's adder keeps fewer bits than float32: every 128 products are added to the
    sums outside it (as in DeepSeek-V3, arXiv:2412.19437).
    """
    if x.dtype == tl.int8:
        sums = tl.dot(x, w, sums, out_dtype=tl.int32)
    elif x.dtype == tl.float8e4nv:
        sums = tl.dot(x, w, sums, max_num_imprecise_acc=128 if x.shape[1] >= 128 else x.shape[1])
    else:
        sums = tl.dot(x, w, sums, input_precision="ieee")
    return sums


@triton.jit
@no_type_check
def _add_tile(
    sums,  # [BT, BF]
    x_sums,  # [BT]
    x,  # [BT, BK]
    values,  # [BK, BF] as they are stored; of 4 bits one half
    scale_ptrs,  # [BF]
    zero_ptrs,  # [BF]
    is_scale,  # [BF]
    IS_FLOAT8: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALING: tl.constexpr,
):
    """Return the sums with a tile's products added, and x_sums, which zeros multiply at the end."""
    scaled: tl.constexpr = SCALING != "end"
    if scaled:
        scale = tl.load(scale_ptrs, mask=is_scale, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zero_ptrs, mask=is_scale, other=0.0).to(tl.float32)

    if IS_FLOAT8:
        w = _float8_values(values)
    elif values.dtype == tl.uint8:  # int8 converts to floating point in one instruction
        w = values.to(tl.int8) - MIDDLE
    else:
        w = values
    if SCALING == "weights":
        w = w.to(tl.float32)
        if HAS_ZEROS:
            w -= zero[None, :]
        w *= scale[None, :]
    w = w.to(x.dtype)

    if SCALING == "sums":
        if x.dtype == tl.int8:
            none = tl.zeros(sums.shape, tl.int32)
        else:
            none = tl.zeros(sums.shape, tl.float32)
        part = _product(x, w, none).to(tl.float32)
        if HAS_ZEROS:
            part -= tl.sum(x.to(tl.float32), axis=1)[:, None] * zero[None, :]
        sums += part * scale[None, :]
    else:
        sums = _product(x, w, sums)
        if HAS_ZEROS and SCALING == "end":
            x_sums += tl.sum(x.to(tl.float32), axis=1)
    return sums, x_sums


@triton.jit
@no_type_check
def _store_tile(
    sums,  # [BT, BF]
    x_sums,  # [BT]
    scale_ptrs,  # [BF]
    zero_ptrs,  # [BF]
    x_scale_ptrs,  # [BT]
    out_ptrs,  # [BT, BF]
    is_token,  # [BT]
    is_column,  # [BF]
    HAS_ZEROS: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    SCALING: tl.constexpr,
):
    """Store complete sums, times what multiplies them at the end."""
    out = sums.to(tl.float32)
    if SCALING == "end":
        if HAS_ZEROS:
            zero = tl.load(zero_ptrs, mask=is_column, other=0.0).to(tl.float32)
            out -= x_sums[:, None] * zero[None, :]
        out *= tl.load(scale_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_X_SCALE:
        out *= tl.load(x_scale_ptrs, mask=is_token, other=0.0)[:, None]
    is_out = is_token[:, None] & is_column[None, :]
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=is_out)


@triton.jit
@no_type_check
def _quantized_matmul(
    x_ptr,  # [T, D]
    values_ptr,  # [rows, F]
    scales_ptr,  # [groups, F]
    zeros_ptr,  # [groups, F]; not read without HAS_ZEROS
    x_scale_ptr,  # [T]; not read without HAS_X_SCALE
    T,
    out_ptr,  # [splits, T, F]
    F: tl.constexpr,  # known at compile time, so that loads of whole vectors are seen to be aligned
    ROWS: tl.constexpr,  # of values: D, or D / 2 of 4 bits
    ITERATIONS: tl.constexpr,  # tiles of rows of a split
    IS_EVEN: tl.constexpr,  # the splits' tiles cover ROWS exactly
    GROUP: tl.constexpr,  # rows of w
    HALF: tl.constexpr,  # byte rows in a run; 0: 8 bits
    IS_FLOAT8: tl.constexpr,  # as bytes
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    SCALING: tl.constexpr,
    BT: tl.constexpr,
    BF: tl.constexpr,
    BK: tl.constexpr,  # divides HALF, and GROUP but for SCALING "end"
    BAND: tl.constexpr,  # tiles of tokens that share their columns while these are in L2
):
    token_tile, column_tile = _tile_of(tl.program_id(0), T, F, BT, BF, BAND)
    token = (token_tile * BT + tl.arange(0, BT)).to(tl.int64)
    column = column_tile * BF + tl.arange(0, BF)
    is_token, is_column = token < T, column < F
    inner = tl.arange(0, BK)
    D: tl.constexpr = ROWS * 2 if HALF else ROWS
    is_integer: tl.constexpr = SCALING == "end" and x_ptr.dtype.element_ty == tl.int8
    sums = tl.zeros([BT, BF], tl.int32 if is_integer else tl.float32)
    x_sums = tl.zeros([BT], tl.float32)
    for iteration in range(0, ITERATIONS):
        row = (tl.program_id(1) * ITERATIONS + iteration) * BK
        is_row = inner < ROWS - row
        is_value = is_column[None, :] if IS_EVEN else is_column[None, :] & is_row[:, None]
        is_x = is_token[:, None] if IS_EVEN else is_token[:, None] & is_row[None, :]
        is_scale = is_column if IS_EVEN else is_column & (row < ROWS)
        value_ptrs = values_ptr + tl.cast(row, tl.int64) * F + inner[:, None] * F + column[None, :]
        values = tl.load(value_ptrs, mask=is_value, other=0.0)
        first = tl.multiple_of(row // HALF * (2 * HALF) + row % HALF if HALF else row, BK)
        x_ptrs = x_ptr + token[:, None] * D + (first + inner)[None, :]
        x = tl.load(x_ptrs, mask=is_x, other=0.0)
        at = first // GROUP * F + column
        if HALF:
            sums, x_sums = _add_tile(
                sums, x_sums, x, values & 15, scales_ptr + at, zeros_ptr + at, is_scale,
                IS_FLOAT8, MIDDLE, HAS_ZEROS, SCALING)  # fmt: skip
            x = tl.load(x_ptrs + HALF, mask=is_x, other=0.0)
            at = (first + HALF) // GROUP * F + column
        sums, x_sums = _add_tile(
            sums, x_sums, x, values >> 4 if HALF else values, scales_ptr + at, zeros_ptr + at,
            is_scale, IS_FLOAT8, MIDDLE, HAS_ZEROS, SCALING)  # fmt: skip
    out_ptrs = out_ptr + (tl.program_id(1) * T + token)[:, None] * F + column[None, :]
    _store_tile(
        sums, x_sums, scales_ptr + column, zeros_ptr + column, x_scale_ptr + token, out_ptrs,
        is_token, is_column, HAS_ZEROS, HAS_X_SCALE, SCALING)  # fmt: skip


@triton.jit
@no_type_check
def _quantize_token(
    x_ptr,  # [T, D]
    values_ptr,  # [T, D]
    scale_ptr,  # [T]
    D: tl.constexpr,
    BD: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    is_column = column < D
    x = tl.load(x_ptr + token * D + column, mask=is_column, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), axis=0)
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, LARGEST))
    values = tl.div_rn(x, scale + tl.zeros_like(x))
    if IS_INTEGER:
        values = (values + ROUNDER) - ROUNDER
    values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + token * D + column, values, mask=is_column)
    tl.store(scale_ptr + token, scale)
