"""Tiles of a weight for Triton kernels: read, and dequantized where the weight is quantized.

A step of a product takes BLOCK_D stored rows. Of 4-bit weights (`quant_array.py`) that is two tiles
of rows of D, HALF apart: `low_row` is the first row of the lower one.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check  # a type checker would wrap it, and Triton compiles a function's source
def low_row(step, BLOCK_D: tl.constexpr, HALF: tl.constexpr):
    """Return the row of D at which a step begins; HALF is 0 where a stored row is a row of D."""
    first = step * BLOCK_D
    if HALF > 0:
        first = first // HALF * (2 * HALF) + first % HALF
    return first


@triton.jit
@no_type_check
def activation_tile(x_ptr, rows, is_row, first, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load x[rows, first : first + BLOCK_D], zeros outside.

    Row offsets need 64 bits: 131,072 rows of 28,672 numbers are 3.8e9.
    """
    k = first + tl.arange(0, BLOCK_D)
    mask = is_row[:, None]
    if D % BLOCK_D != 0:
        mask = mask & (k < D)[None, :]
    row_start = rows.to(tl.int64) * D
    return tl.load(x_ptr + row_start[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def stored_tile(
    w_ptr,
    step,
    columns,
    is_column,
    STORED: tl.constexpr,
    F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the stored rows of a step, zeros outside; `w_ptr` points to the matrix."""
    row = tl.arange(0, BLOCK_D)
    mask = is_column[None, :]
    if STORED % BLOCK_D != 0:
        mask = mask & (row < STORED - step * BLOCK_D)[:, None]
    # One 64-bit offset a step; inside a tile 32 bits are enough.
    w_ptr += tl.cast(step * BLOCK_D, tl.int64) * F
    return tl.load(w_ptr + row[:, None] * F + columns[None, :], mask=mask, other=0)


@triton.jit
@no_type_check
def dequantized(
    values,
    scales_ptr,
    zeros_ptr,
    first,
    columns,
    is_column,
    F: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Return (values - zeros) * scales in float32; all rows are in the group of row `first`."""
    at = first // GROUP_SIZE * F + columns
    scales = tl.load(scales_ptr + at, mask=is_column, other=0.0).to(tl.float32)
    wide = values.to(tl.float32)
    if HAS_ZEROS:
        zeros = tl.load(zeros_ptr + at, mask=is_column, other=0.0).to(tl.float32)
        return (wide - zeros[None, :]) * scales[None, :]
    return (wide - MIDDLE) * scales[None, :]


@triton.jit
@no_type_check
def product(sums, x, w, PRECISION: tl.constexpr):
    """Return sums + x @ w, with w in x's type."""
    return tl.dot(x, w.to(x.dtype), sums, input_precision=PRECISION)
