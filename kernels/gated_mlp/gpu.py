"""The gated half of a feed-forward layer on GPUs: one Triton kernel, sm_80 and later.

Formula and layout: `api.py`; the kernel: `gpu_kernel.py`. A program multiplies a tile of tokens
with one tile of the gate and the same of the up projection, and ends with the activation: of the
[T, 2F] that two plain kernels would write and read again, nothing leaves the registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxinfer.kernels.grouped_matmul.gpu_layout import (
    LEAST,
    MULTIPROCESSORS,
    check_weight,
    has_wide_tiles,
    most_rows,
    weight_constexprs,
    weight_inputs,
)
from jaxinfer.kernels.grouped_matmul.weights import shape_of
from jaxinfer.kernels.triton_launch import (
    Launcher,
    TritonLaunch,
    check_schedule,
    jax_triton,
    require_triton,
)
from jaxinfer.kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class GpuGatedTiling:
    """How a call is divided."""

    tokens: int  # tokens of a program
    rows: int  # rows of the weight, as stored, in a step of the product
    columns: int  # columns of F of a program, in the gate and in the up projection each
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name in ("tokens", "rows", "columns"):
            value = getattr(self, name)
            if value < LEAST or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, {LEAST} or more")
        check_schedule(self.num_warps, self.num_stages)


def heuristic(x, gate_up) -> GpuGatedTiling:
    """Return a tiling from shapes, types and the chip.

    Few tokens: the weights stream, so narrow tiles, of which there are some for every
    multiprocessor (F = 14336: 448 of 32 columns for 132), and deep steps kept in flight. Many:
    128 x 256 numbers of the two products a program where warp groups multiply them, else 128 x 128.
    """
    T, rows = x.shape[0], most_rows(gate_up)
    tokens = max(LEAST, min(128, 1 << (T - 1).bit_length()))
    if x.dtype.itemsize > 2:  # no tensor cores: the sums of a thread must stay in its registers
        return GpuGatedTiling(min(tokens, 32), min(rows, 32), 32)
    # With four bits, a step has twice the tiles, and they are dequantized in registers.
    is_packed = getattr(gate_up, "bits", 8) == 4
    if tokens <= 32:
        rows = min(rows, 64) if is_packed else rows
        return GpuGatedTiling(tokens, rows, _columns(32, gate_up), num_stages=4)
    if tokens == 64:
        rows, most = (min(rows, 32), 32) if is_packed else (min(rows, 64), 64)
        return GpuGatedTiling(64, rows, _columns(most, gate_up), num_stages=4)
    if has_wide_tiles() and not is_packed:
        return GpuGatedTiling(128, min(rows, 64), 128, num_warps=8)
    columns = 32 if is_packed and not has_wide_tiles() else 64
    return GpuGatedTiling(
        128, min(rows, 32), columns, num_warps=8, num_stages=3 if is_packed else 4
    )


def _columns(most: int, gate_up) -> int:
    """Return `most`, or so few that each multiprocessor has a tile of F (3584 in 132: 16)."""
    F = shape_of(gate_up)[2]
    while most > LEAST and F // most < MULTIPROCESSORS:
        most //= 2
    return most


def tiling_key(x, gate_up, **options: Any) -> str:
    """Return the key of a measured tiling."""
    _, D, F = shape_of(gate_up)
    bits = getattr(gate_up, "bits", x.dtype.itemsize * 8)
    return f"T={x.shape[0]} D={D} F={F} bits={bits} {x.dtype.name}"


def candidates(x, gate_up, **options: Any) -> list[GpuGatedTiling]:
    """Return the tilings worth measuring for a call."""
    own, most = heuristic(x, gate_up), most_rows(gate_up)
    found = [own]
    for columns in (16, 32, 64, 128):
        for rows in sorted({min(most, rows) for rows in (32, 64, 128)}):
            for num_stages in (3, 4, 5):
                tile = own.tokens * rows + 2 * rows * columns
                num_warps = 8 if own.tokens * columns >= 128 * 64 else 4
                if num_stages * tile * x.dtype.itemsize <= 160 * 1024:
                    found.append(GpuGatedTiling(own.tokens, rows, columns, num_warps, num_stages))
    return list(dict.fromkeys(found))


def gated_mlp(
    x,  # [T, D]
    gate_up,  # [2, D, F]
    *,
    activation,
    bias,  # [2, F] or None
    tiling: GpuGatedTiling | None = None,
    launch: Launcher = jax_triton,
):
    """Return [T, F]. Declines (`NotImplementedError`) where Triton is not installed, and weights
    that it does not read."""
    require_triton()
    check_weight(gate_up, x)
    from jaxinfer.kernels.gated_mlp import gpu_kernel

    tiling = tiling or tuned(heuristic(x, gate_up), "gated_mlp/gpu", tiling_key(x, gate_up))
    if most_rows(gate_up) % tiling.rows:
        raise ValueError(f"steps of {tiling.rows} rows cross a group of {most_rows(gate_up)}")
    T, F = x.shape[0], shape_of(gate_up)[2]
    (out,) = launch(
        TritonLaunch(
            gpu_kernel.gated_mlp,
            (-(-T // tiling.tokens), -(-F // tiling.columns)),
            (x, *weight_inputs(gate_up), x if bias is None else bias, T),
            (jax.ShapeDtypeStruct((T, F), x.dtype),),
            {
                **weight_constexprs(gate_up, x),
                "HAS_BIAS": bias is not None,
                "ACTIVATION": activation,
                "BLOCK_T": tiling.tokens,
                "BLOCK_D": tiling.rows,
                "BLOCK_F": tiling.columns,
            },
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    )
    return out
