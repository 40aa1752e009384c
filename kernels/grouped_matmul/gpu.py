"""Grouped products on GPUs: one Triton kernel, sm_80 and later.

Formula: `api.py`; the kernel: `gpu_kernel.py`. A program takes a tile of rows of one group, tiles
beginning where groups do, and a tile of F. It finds its rows and its group from the E sizes, so
nothing is launched before it; the grid is as large as any sizes could need, and
programs without an item end at once. Programs of one group and tile of F are neighbours: they share
its matrix in the L2 cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

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
class GpuGroupedTiling:
    """How a call is divided."""

    tokens: int  # rows of x of a program
    rows: int  # rows of the weight, as stored, in a step of the product
    columns: int  # columns of F of a program
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name in ("tokens", "rows", "columns"):
            value = getattr(self, name)
            if value < LEAST or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, {LEAST} or more")
        check_schedule(self.num_warps, self.num_stages)


def heuristic(x, weights) -> GpuGroupedTiling:
    """Return a tiling from shapes, types and the chip.

    Tiles of about a group's even share of the rows. Small ones stream the weights by deep and
    narrow steps, of which several are in flight; large ones are those of a dense product.
    """
    share = max(1, x.shape[0] // shape_of(weights)[0])
    tokens = max(LEAST, min(128, 1 << (share - 1).bit_length()))
    rows = most_rows(weights)
    if x.dtype.itemsize > 2:  # no tensor cores: the sums of a thread must stay in its registers
        return GpuGroupedTiling(min(tokens, 32), min(rows, 32), 32)
    is_packed = getattr(weights, "bits", 8) == 4  # twice the tiles a step
    if tokens <= 32:
        columns, tiles = 64, min(x.shape[0], shape_of(weights)[0]) * shape_of(weights)[2] // 64
        while columns > LEAST and tiles < MULTIPROCESSORS:
            columns, tiles = columns // 2, tiles * 2
        return GpuGroupedTiling(tokens, min(rows, 64) if is_packed else rows, columns, num_stages=4)
    if tokens == 64:
        return GpuGroupedTiling(64, min(rows, 32 if is_packed else 64), 64, num_stages=4)
    if has_wide_tiles() and not is_packed:
        return GpuGroupedTiling(128, min(rows, 64), 128, num_warps=8)
    return GpuGroupedTiling(128, min(rows, 32), 64 if is_packed else 128, num_warps=8)


def tiling_key(x, weights, group_sizes, **options: Any) -> str:
    """Return the key of a measured tiling."""
    E, D, F = shape_of(weights)
    bits = getattr(weights, "bits", x.dtype.itemsize * 8)
    return f"T={x.shape[0]} E={E} D={D} F={F} bits={bits} {x.dtype.name}"


def candidates(x, weights, group_sizes, **options: Any) -> list[GpuGroupedTiling]:
    """Return the tilings worth measuring for a call."""
    own, most = heuristic(x, weights), most_rows(weights)
    found = [own]
    for tokens in sorted({own.tokens, max(LEAST, own.tokens // 2)}):
        for columns in (32, 64, 128):
            for rows in sorted({min(most, rows) for rows in (32, 64, 128)}):
                for num_stages in (3, 4, 5):
                    step = tokens * rows + rows * columns
                    if num_stages * step * x.dtype.itemsize <= 160 * 1024:
                        num_warps = 8 if tokens * columns >= 128 * 128 else 4
                        found.append(GpuGroupedTiling(tokens, rows, columns, num_warps, num_stages))
    return list(dict.fromkeys(found))


def num_items(T: int, E: int, tile: int) -> int:
    """Return the most tiles that T rows in E groups, and rows of no group, can make."""
    most_groups = min(E + 1, T)
    return (T + most_groups * (tile - 1)) // tile


def grouped_matmul(
    x,  # [T, D]
    weights,  # [E, D, F]
    group_sizes,  # [E]
    *,
    tiling: GpuGroupedTiling | None = None,
    launch: Launcher = jax_triton,
):
    """Return [T, F]. Declines (`NotImplementedError`) where Triton is not installed, and weights
    that it does not read."""
    require_triton()
    check_weight(weights, x)
    from jaxinfer.kernels.grouped_matmul import gpu_kernel

    key = tiling_key(x, weights, group_sizes)
    tiling = tiling or tuned(heuristic(x, weights), "grouped_matmul/gpu", key)
    if most_rows(weights) % tiling.rows:
        raise ValueError(f"steps of {tiling.rows} rows cross a group of {most_rows(weights)}")
    T, (E, _, F) = x.shape[0], shape_of(weights)
    (out,) = launch(
        TritonLaunch(
            gpu_kernel.grouped_matmul,
            (num_items(T, E, tiling.tokens), -(-F // tiling.columns)),
            (x, *weight_inputs(weights), group_sizes.astype(jnp.int32), T),
            (jax.ShapeDtypeStruct((T, F), x.dtype),),
            {
                "E": E,
                "PADDED_E": max(2, 1 << (E - 1).bit_length()),
                **weight_constexprs(weights, x),
                "BLOCK_T": tiling.tokens,
                "BLOCK_D": tiling.rows,
                "BLOCK_F": tiling.columns,
            },
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    )
    return out
