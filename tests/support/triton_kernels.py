"""Triton kernels for the tests of the launchers; import after the check that Triton is
installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_sum(x_ptr, n, times, scale, y_ptr, BLOCK: tl.constexpr):
    """Compute y = scale * (x + x + ...), `times` terms."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(times):
        total += x
    tl.store(y_ptr + at, (total * scale).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def add_into(x_ptr, base_ptr, out_ptr, BLOCK: tl.constexpr):
    """Compute out = base + x, where both are the same memory."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(base_ptr + at) + tl.load(x_ptr + at))


@triton.jit
def product(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    """Compute out = x @ y, all [N, N], summed in float32."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))
