"""The Triton kernel of grouped products; see `gpu.py`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from jaxinfer.kernels.grouped_matmul.gpu_weights import (
    activation_tile,
    dequantized,
    low_row,
    product,
    stored_tile,
)


@triton.jit
@no_type_check  # a type checker would wrap it, and Triton compiles a function's source
def item_of(sizes_ptr, T, E: tl.constexpr, PADDED_E: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return this program's group, whether it has one, and its rows, from the sizes alone.

    Tiles are numbered group by group; those of rows of no group come last.
    """
    item = tl.program_id(0)
    experts = tl.arange(0, PADDED_E)
    sizes = tl.load(sizes_ptr + experts, mask=experts < E, other=0)
    tiles = (sizes + BLOCK_T - 1) // BLOCK_T
    end_tiles, end_rows = tl.cumsum(tiles, 0), tl.cumsum(sizes, 0)
    num_tiles, num_rows = tl.sum(tiles, 0), tl.sum(sizes, 0)
    expert = tl.sum((end_tiles <= item).to(tl.int32), 0)
    is_its, is_real = experts == expert, item < num_tiles
    first_tile = tl.sum(tl.where(is_its, end_tiles - tiles, 0), 0)
    first_row = tl.sum(tl.where(is_its, end_rows - sizes, 0), 0)
    end = tl.where(is_real, tl.sum(tl.where(is_its, end_rows, 0), 0), T)
    first_tile = tl.where(is_real, first_tile, num_tiles)
    first_row = tl.where(is_real, first_row, num_rows) + (item - first_tile) * BLOCK_T
    return expert, is_real, first_row, end


@triton.jit
@no_type_check
def grouped_matmul(
    x_ptr,  # [T, D]
    w_ptr,  # [E, STORED, F]
    scales_ptr,  # [E, D / GROUP_SIZE, F]
    zeros_ptr,  # [E, D / GROUP_SIZE, F]
    sizes_ptr,  # [E]
    T,
    out_ptr,  # [T, F]
    E: tl.constexpr,
    PADDED_E: tl.constexpr,  # a power of two
    D: tl.constexpr,
    F: tl.constexpr,
    STORED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    expert, is_real, first_row, end = item_of(sizes_ptr, T, E, PADDED_E, BLOCK_T)
    if first_row >= end:
        return

    rows = first_row + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_row, is_column = rows < end, columns < F
    sums = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    w_ptr += expert.to(tl.int64) * (STORED * F)
    if BITS > 0:
        scales_ptr += expert.to(tl.int64) * (D // GROUP_SIZE * F)
        zeros_ptr += expert.to(tl.int64) * (D // GROUP_SIZE * F)
    num_steps = tl.where(is_real, tl.cdiv(STORED, BLOCK_D), 0)
    for step in range(num_steps):
        first = low_row(step, BLOCK_D, HALF)
        x = activation_tile(x_ptr, rows, is_row, first, D, BLOCK_D)
        w = stored_tile(w_ptr, step, columns, is_column, STORED, F, BLOCK_D)
        if BITS == 0:
            sums = product(sums, x, w, PRECISION)
        else:
            for half in tl.static_range(2 if BITS == 4 else 1):  # the halves of a byte
                k = first + half * HALF
                if half == 1:
                    x = activation_tile(x_ptr, rows, is_row, k, D, BLOCK_D)
                values = (w >> (4 * half)) & 15 if BITS == 4 else w
                values = dequantized(values, scales_ptr, zeros_ptr, k, columns, is_column, F,
                                     GROUP_SIZE, MIDDLE, HAS_ZEROS)  # fmt: skip
                sums = product(sums, x, values, PRECISION)
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * F + columns[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
