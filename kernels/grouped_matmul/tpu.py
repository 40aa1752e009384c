"""Grouped products on TPUs: one Pallas (Mosaic) kernel.

Formula: `api.py`. Row tiles lie where the array's tiles do, so a tile may hold rows of several
groups. The grid walks items, pairs of a row tile and a group with rows in it, in the order of the
rows: each multiplies the whole tile with its group's matrix and keeps the rows that are the
group's. GroupItems of one tile follow one another, so the result's tile stays in VMEM between them;
items of one group do too, so with D in one tile its matrix is read once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.grouped_matmul.tpu_items import GroupItems, work_list
from jaxinfer.kernels.grouped_matmul.tpu_weights import (
    LANES,
    WeightTile,
    check_mosaic,
    multiply,
    room,
    rows_for,
    tile_of,
)
from jaxinfer.kernels.grouped_matmul.weights import operands, shape_of
from jaxinfer.kernels.tpu_chips import MEBI, MEGACORE, SMALL_VMEM
from jaxinfer.kernels.tuning import tuned

ROWS = 16  # tokens of a register of bfloat16


@dataclasses.dataclass(frozen=True)
class TpuGroupedTiling:
    """How a call is divided."""

    tokens: int  # tokens of a tile
    rows: int  # rows of D of a tile; whole tiles cover D
    columns: int  # columns of F of a tile

    def __post_init__(self):
        if self.tokens % ROWS or self.tokens < 1:
            raise ValueError(f"tokens {self.tokens} is no multiple of {ROWS}")


def heuristic(x, weights) -> TpuGroupedTiling:
    """Return a tiling from shapes, types and the chip.

    Row tiles of about a group's even share, since a tile is multiplied once for each group in it;
    128 at least, the rows that a matrix unit takes at once. Weight tiles of about 4 MiB, the whole
    of D where that fits.
    """
    T, (E, _, F) = x.shape[0], shape_of(weights)
    is_small = device_kind() in SMALL_VMEM or x.dtype.itemsize > 2
    share = 1 << (max(1, T // E) - 1).bit_length()
    tokens = min(-(-T // ROWS) * ROWS, max(128, min(512, share)))
    columns = 1024 if tokens > 128 and not is_small else 512
    cores = 2 if device_kind() in MEGACORE else 1
    columns = min(columns, -(-F // (cores * LANES)) * LANES)
    most = (2 if is_small else 4) * MEBI // (columns * x.dtype.itemsize)
    return TpuGroupedTiling(tokens, rows_for(weights, most), columns)


def tiling_key(x, weights, group_sizes, **options: Any) -> str:
    """Return the key of a measured tiling."""
    E, D, F = shape_of(weights)
    bits = getattr(weights, "bits", x.dtype.itemsize * 8)
    return f"T={x.shape[0]} E={E} D={D} F={F} bits={bits} {x.dtype.name}"


def candidates(x, weights, group_sizes, **options: Any) -> list[TpuGroupedTiling]:
    """Return the tilings worth measuring for a call."""
    return [t for t in _search(x, weights) if vmem_bytes(t, x, weights) <= room()]


def _search(x, weights) -> Iterator[TpuGroupedTiling]:
    all_tokens = -(-x.shape[0] // ROWS) * ROWS
    for tokens in sorted({min(all_tokens, most) for most in (64, 128, 256, 512)}):
        for rows in sorted({rows_for(weights, most) for most in (512, 1024, 2048, 4096)}):
            for columns in (128, 256, 512, 1024):
                if columns <= shape_of(weights)[2]:
                    yield TpuGroupedTiling(tokens, rows, columns)


def vmem_bytes(tiling: TpuGroupedTiling, x, weights) -> int:
    """Return the bytes of two buffers of every block, the sums and the product."""
    rows, columns = tiling.rows, tiling.columns
    weight = tile_of(weights, None, rows, columns).vmem_bytes(weights)
    blocks = 2 * tiling.tokens * (rows + columns) * x.dtype.itemsize
    return weight + blocks + 2 * 4 * tiling.tokens * columns


def grouped_matmul(
    x,  # [T, D]
    weights,  # [E, D, F]
    group_sizes,  # [E]
    *,
    tiling: TpuGroupedTiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return [T, F]. Declines (`NotImplementedError`) what Mosaic cannot compile."""
    key = tiling_key(x, weights, group_sizes)
    tiling = tiling or tuned(heuristic(x, weights), "grouped_matmul/tpu", key)
    T, (_, D, F) = x.shape[0], shape_of(weights)
    if D % tiling.rows:
        raise ValueError(f"tiles of {tiling.rows} rows do not cover D = {D}")
    if not interpret:
        check_mosaic(x, weights, vmem_bytes(tiling, x, weights))
    tile = tile_of(weights, None, tiling.rows, tiling.columns)
    num_steps = D // tiling.rows
    items = work_list(group_sizes, T, tiling.tokens, interpret)

    def step_of(i, d, items):
        """Return the weight tile of a step; an item without rows keeps the tile that is loaded."""
        return jnp.where(items.first[i] < items.end[i], d, num_steps - 1)

    def x_at(f, i, d, *refs):
        items = GroupItems(*refs)
        return items.tile[i], step_of(i, d, items)

    def weights_at(f, i, d, *refs):
        items = GroupItems(*refs)
        return items.group[i], step_of(i, d, items), f

    return pl.pallas_call(
        partial(_kernel, tile, tiling.tokens, num_steps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(pl.cdiv(F, tiling.columns), items.tile.shape[0], num_steps),
            in_specs=[
                pl.BlockSpec((tiling.tokens, tiling.rows), x_at),
                *tile.specs(weights_at),
            ],
            out_specs=pl.BlockSpec(
                (tiling.tokens, tiling.columns), lambda f, i, d, tiles, *_: (tiles[i], f)
            ),
            scratch_shapes=[pltpu.VMEM((tiling.tokens, tiling.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((T, F), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=max(16 * MEBI, vmem_bytes(tiling, x, weights) * 4 // 3 + 2 * MEBI),
        ),
        cost_estimate=_cost(x, weights),
        interpret=interpret,
        name="grouped_matmul",
    )(*items, x, *operands(weights))


def _cost(x, weights) -> pl.CostEstimate:
    """Return the cost as if each row met one matrix, and each matrix a row."""
    T, (E, D, F) = x.shape[0], shape_of(weights)
    size = lambda a: math.prod(a.shape) * a.dtype.itemsize
    read = size(x) + sum(map(size, operands(weights))) * min(T, E) // E
    return pl.CostEstimate(
        flops=2 * T * D * F, bytes_accessed=read + T * F * x.dtype.itemsize, transcendentals=0
    )


def _kernel(tile: WeightTile, tokens: int, num_steps: int, *refs) -> None:
    items = GroupItems(*refs[:4])
    x_ref = refs[4]  # [tokens, rows]
    weight_refs = refs[5 : 5 + tile.num_operands]  # [rows, columns]
    out_ref = refs[5 + tile.num_operands]  # [tokens, columns]
    sums_ref = refs[6 + tile.num_operands]  # [tokens, columns]
    i, step = pl.program_id(1), pl.program_id(2)
    tile_id, first, end = items.tile[i], items.first[i], items.end[i]
    is_first = (i == 0) | (items.tile[jnp.maximum(i - 1, 0)] != tile_id)

    @pl.when(is_first & (step == 0))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(first < end)
    def _():
        product = multiply(x_ref[...], tile.load(weight_refs, (), x_ref.dtype))
        if num_steps > 1:
            product += jnp.where(step == 0, 0, sums_ref[...])
            sums_ref[...] = product

        @pl.when(step == num_steps - 1)
        def _():
            row = tile_id * tokens + jax.lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
            is_its = (row >= first) & (row < end)
            out_ref[...] = jnp.where(is_its, product.astype(out_ref.dtype), out_ref[...])
