"""The gated half of a feed-forward layer on TPUs: one Pallas (Mosaic) kernel.

Formula and layout: `api.py`. A step of the grid multiplies a tile of tokens with a tile of the gate
and the same tile of the up projection; the last along D applies the activation, so that the two
products never leave VMEM. Weights are read once for each tile of tokens.
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
from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
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
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray
from jaxinfer.kernels.tpu_chips import MEBI, SMALL_VMEM
from jaxinfer.kernels.tuning import tuned

KEEP_PRODUCTS = ("TPU v4", "TPU v6 lite", "TPU7x")
KEPT_BYTES = 4 * 2**20  # seen kept: 64 tokens of F = 14336, 3.5 MiB; not kept: 112
ROWS = 16  # tokens of a register of bfloat16


@dataclasses.dataclass(frozen=True)
class TpuGatedTiling:
    """How a call is divided."""

    tokens: int  # tokens of a tile
    rows: int  # rows of D of a tile; whole tiles cover D
    columns: int  # columns of F of a tile

    def __post_init__(self):
        if self.tokens % ROWS or self.tokens < 1:
            raise ValueError(f"tokens {self.tokens} is no multiple of {ROWS}")


def heuristic(x, gate_up) -> TpuGatedTiling:
    """Return a tiling from shapes, types and the chip.

    Few tokens: weights stream, so tiles of about 4 MiB, the whole of D where that fits, and no sums
    are kept between steps. Many tokens: 2 c t / (t + 2 c) operations a byte for tiles of t tokens
    and c columns must be above what the chip does while it reads a byte (240 on a v5e, 575 on a
    v6e): 341 for 512 x 512, 512 for 1024 x 512; a v4's VMEM holds the first.
    """
    T, F = x.shape[0], shape_of(gate_up)[2]
    is_small = device_kind() in SMALL_VMEM
    tokens = min(-(-T // ROWS) * ROWS, 512 if is_small or x.dtype.itemsize > 2 else 1024)
    columns = min(-(-F // LANES) * LANES, 256 if tokens <= 128 else 512)
    room = (2 if is_small else 4) * MEBI
    most = room // (2 * columns * x.dtype.itemsize)
    return TpuGatedTiling(
        tokens, rows_for(gate_up, min(most, 2048 if tokens > 128 else most)), columns
    )


def tiling_key(x, gate_up, **options: Any) -> str:
    """Return the key of a measured tiling."""
    _, D, F = shape_of(gate_up)
    bits = getattr(gate_up, "bits", x.dtype.itemsize * 8)
    return f"T={x.shape[0]} D={D} F={F} bits={bits} {x.dtype.name}"


def candidates(x, gate_up, **options: Any) -> list[TpuGatedTiling]:
    """Return the tilings worth measuring for a call."""
    return [t for t in _search(x, gate_up) if vmem_bytes(t, x, gate_up) <= room()]


def _search(x, gate_up) -> Iterator[TpuGatedTiling]:
    T, F = x.shape[0], shape_of(gate_up)[2]
    all_tokens = -(-T // ROWS) * ROWS
    for tokens in {min(all_tokens, most) for most in (256, 512, 1024)}:
        for rows in {rows_for(gate_up, most) for most in (512, 1024, 2048, 4096)}:
            for columns in (128, 256, 512, 1024):
                if columns <= F:
                    yield TpuGatedTiling(tokens, rows, columns)


def saves_nothing(x, gate_up) -> bool:
    """Return whether XLA is no worse: it keeps a small product in VMEM between its launches, and
    has no more of them (docs/fusion.md). With quantized weights the kernel avoids writing wide
    ones."""
    if isinstance(gate_up, QuantArray) or device_kind() not in KEEP_PRODUCTS:
        return False
    return 2 * x.shape[0] * gate_up.shape[2] * x.dtype.itemsize <= KEPT_BYTES


def vmem_bytes(tiling: TpuGatedTiling, x, gate_up) -> int:
    """Return the bytes of two buffers of every block, the sums, and the activation's float32
    tiles."""
    rows, columns = tiling.rows, tiling.columns
    weight = tile_of(gate_up, 2, rows, columns).vmem_bytes(gate_up)
    blocks = 2 * tiling.tokens * (rows + columns) * x.dtype.itemsize
    return weight + blocks + 4 * 4 * tiling.tokens * columns


def gated_mlp(
    x,  # [T, D]
    gate_up,  # [2, D, F]
    *,
    activation,
    bias,  # [2, F] or None
    tiling: TpuGatedTiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return [T, F]. Declines (`NotImplementedError`) what Mosaic cannot compile."""
    tiling = tiling or tuned(heuristic(x, gate_up), "gated_mlp/tpu", tiling_key(x, gate_up))
    T, (_, D, F) = x.shape[0], shape_of(gate_up)
    if D % tiling.rows:
        raise ValueError(f"tiles of {tiling.rows} rows do not cover D = {D}")
    needed = vmem_bytes(tiling, x, gate_up)
    if not interpret:
        check_mosaic(x, gate_up, needed)
    tile = tile_of(gate_up, 2, tiling.rows, tiling.columns)
    num_steps = D // tiling.rows
    specs = [pl.BlockSpec((tiling.tokens, tiling.rows), lambda f, t, d: (t, d))]
    specs += tile.specs(lambda f, t, d: (0, d, f))
    arrays = [x, *operands(gate_up)]
    if bias is not None:
        specs.append(pl.BlockSpec((2, tiling.columns), lambda f, t, d: (0, f)))
        arrays.append(bias)
    sums = pltpu.VMEM((2, tiling.tokens, tiling.columns), jnp.float32)
    return pl.pallas_call(
        partial(_kernel, tile, ACTIVATIONS[activation], bias is not None, num_steps),
        grid=(pl.cdiv(F, tiling.columns), pl.cdiv(T, tiling.tokens), num_steps),
        in_specs=specs,
        out_specs=pl.BlockSpec((tiling.tokens, tiling.columns), lambda f, t, d: (t, f)),
        out_shape=jax.ShapeDtypeStruct((T, F), x.dtype),
        scratch_shapes=[sums] if num_steps > 1 else [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=max(16 * MEBI, needed * 4 // 3 + 2 * MEBI),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * T * D * F,
            bytes_accessed=_bytes(x, gate_up, T * F),
            transcendentals=T * F,
        ),
        interpret=interpret,
        name="gated_mlp",
    )(*arrays)


def _bytes(x, gate_up, num_results: int) -> int:
    sizes = [math.prod(a.shape) * a.dtype.itemsize for a in (x, *operands(gate_up))]
    return sum(sizes) + num_results * x.dtype.itemsize


def _kernel(tile: WeightTile, act, has_bias: bool, num_steps: int, *refs) -> None:
    x_ref = refs[0]  # [tokens, rows]
    weight_refs = refs[1 : 1 + tile.num_operands]  # [2, rows, columns]
    bias_ref = refs[1 + tile.num_operands] if has_bias else None  # [2, columns]
    out_ref = refs[1 + tile.num_operands + has_bias]  # [tokens, columns]
    step = pl.program_id(2)
    x = x_ref[...]
    products = [multiply(x, tile.load(weight_refs, (half,), x.dtype)) for half in (0, 1)]

    def finish(gate, up):
        if bias_ref is not None:
            wide = bias_ref[...].astype(jnp.float32)
            gate, up = gate + wide[0:1], up + wide[1:2]
        out_ref[...] = (act(gate) * up).astype(out_ref.dtype)

    if num_steps == 1:
        finish(*products)
        return
    sums_ref = refs[-1]  # [2, tokens, columns]

    @pl.when(step == 0)
    def _():
        sums_ref[0], sums_ref[1] = products

    @pl.when((step > 0) & (step < num_steps - 1))
    def _():
        sums_ref[0] += products[0]
        sums_ref[1] += products[1]

    @pl.when(step == num_steps - 1)
    def _():
        finish(sums_ref[0] + products[0], sums_ref[1] + products[1])
