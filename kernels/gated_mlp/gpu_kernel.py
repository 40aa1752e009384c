"""The Triton kernel of the gated half of a feed-forward layer; see `gpu.py`."""

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
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        # 1 + tanh(z) = 2 sigmoid(2 z); 0.79788... = sqrt(2 / pi).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
@no_type_check
def bias_row(at, is_column):
    return tl.load(at, mask=is_column, other=0.0).to(tl.float32)[None, :]


@triton.jit
@no_type_check
def gated_mlp(
    x_ptr,  # [T, D]
    w_ptr,  # [2, STORED, F]
    scales_ptr,  # [2, D / GROUP_SIZE, F]
    zeros_ptr,  # [2, D / GROUP_SIZE, F]
    bias_ptr,  # [2, F]
    T,
    out_ptr,  # [T, F]
    D: tl.constexpr,
    F: tl.constexpr,
    STORED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_row, is_column = rows < T, columns < F
    gate = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    up_ptr = w_ptr + STORED * F
    if BITS > 0:
        up_scales, up_zeros = scales_ptr + D // GROUP_SIZE * F, zeros_ptr + D // GROUP_SIZE * F
    for step in range(tl.cdiv(STORED, BLOCK_D)):
        first = low_row(step, BLOCK_D, HALF)
        x = activation_tile(x_ptr, rows, is_row, first, D, BLOCK_D)
        g = stored_tile(w_ptr, step, columns, is_column, STORED, F, BLOCK_D)
        u = stored_tile(up_ptr, step, columns, is_column, STORED, F, BLOCK_D)
        if BITS == 0:
            gate = product(gate, x, g, PRECISION)
            up = product(up, x, u, PRECISION)
        else:
            for half in tl.static_range(2 if BITS == 4 else 1):  # the halves of a byte
                k = first + half * HALF
                if half == 1:
                    x = activation_tile(x_ptr, rows, is_row, k, D, BLOCK_D)
                a = (g >> (4 * half)) & 15 if BITS == 4 else g
                b = (u >> (4 * half)) & 15 if BITS == 4 else u
                a = dequantized(a, scales_ptr, zeros_ptr, k, columns, is_column, F, GROUP_SIZE,
                                MIDDLE, HAS_ZEROS)  # fmt: skip
                b = dequantized(b, up_scales, up_zeros, k, columns, is_column, F, GROUP_SIZE,
                                MIDDLE, HAS_ZEROS)  # fmt: skip
                gate = product(gate, x, a, PRECISION)
                up = product(up, x, b, PRECISION)
    if HAS_BIAS:
        gate += bias_row(bias_ptr + columns, is_column)
        up += bias_row(bias_ptr + F + columns, is_column)
    out = activated(gate, ACTIVATION) * up
    at = out_ptr + rows.to(tl.int64)[:, None] * F + columns[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
