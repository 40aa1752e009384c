"""A product with a quantized weight on TPUs: one Pallas (Mosaic) kernel.

Formula and contract: `api.py`. The grid walks tiles of tokens, of columns and, innermost, of rows;
a tile of values is converted in VMEM to numbers that the multiplier takes (`tpu_kernel.py`), so
that memory moves only the values. Where a chip multiplies no int8 or float8, activations of that
type are multiplied as bfloat16, which holds them and the values exactly.

Measured by compiling for v4, v5e, v5p, v6e and 7x without a device (jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray
from jaxinfer.kernels.quantized_matmul.tpu_kernel import TpuQuantizedPlan, kernel
from jaxinfer.kernels.tpu_chips import MEBI, SMALL_VMEM
from jaxinfer.kernels.tuning import tuned

LANES = 128
# Chips whose multiplier takes operands of the type, by the beginning of their names.
MULTIPLIES = {
    "int8": ("TPU v5", "TPU v6"),
    "float8_e4m3fn": ("TPU7",),
}


@dataclasses.dataclass(frozen=True)
class TpuQuantizedTiling:
    """How a call is divided. Results differ by rounding alone.

    A tile covers an axis that is shorter; `row_tile` is an upper bound: the tile is the largest
    divisor of D up to it that whole groups, bytes and lanes allow.
    """

    token_tile: int
    column_tile: int
    row_tile: int

    def __post_init__(self):
        for name, unit in (("token_tile", 32), ("column_tile", LANES), ("row_tile", LANES)):
            if getattr(self, name) < unit or getattr(self, name) % unit:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of {unit}"
                )


def heuristic(x, weight: QuantArray) -> TpuQuantizedTiling:
    """Return a tiling from shapes and types alone.

    Few tokens: tiles of half a million weights, whose fetch takes longer than a step of the grid
    costs (about 0.35 microseconds, in which a v5e moves 0.3 MB). Many: 512 tokens to a tile, which
    share the work of converting the values, and 1,024 columns, which share a fetch of x.
    """
    if x.shape[0] <= 128:
        return TpuQuantizedTiling(token_tile=128, column_tile=512, row_tile=1024)
    return TpuQuantizedTiling(token_tile=512, column_tile=1024, row_tile=512)


def candidates(x, weight: QuantArray, **options: Any) -> list[TpuQuantizedTiling]:
    """Return the tilings worth measuring for the arguments of `quantized_matmul`."""
    T = x.shape[0]
    tokens = [128] if T <= 128 else [256, 512, 1024]
    tilings = [
        TpuQuantizedTiling(token_tile, column_tile, row_tile)
        for token_tile in tokens
        for column_tile in (256, 512, 1024, 2048)
        for row_tile in (256, 512, 1024, 2048)
    ]
    fits = lambda t: vmem_bytes(_tiles(t, x, weight), weight, x.dtype) <= _room()
    return [tiling for tiling in tilings if fits(tiling)]


def tiling_key(x, weight: QuantArray, **options: Any) -> str:
    """Return the key of a measured tiling."""
    kind = "float8" if weight.is_float else f"int{weight.bits}"
    zeros = " zeros" if weight.zeros is not None else ""
    taken = options.get("activation_dtype") or jnp.dtype(x.dtype).name
    T, D, F = 1 << (x.shape[0] - 1).bit_length(), weight.num_rows, weight.num_columns
    return f"T={T} D={D} F={F} {kind}/{weight.group_size}{zeros} {taken}"


def _tiles(tiling: TpuQuantizedTiling, x, weight: QuantArray) -> tuple[int, int, int]:
    """Return the tokens, columns and rows of a tile. Raises `NotImplementedError` for groups it
    cannot cut."""
    D, group = weight.num_rows, weight.group_size
    if group != D and group % 32:
        raise NotImplementedError(f"groups of {group} rows; a tile holds multiples of 32")
    unit = max(LANES, weight.pack_rows)
    fits = [
        rows
        for rows in range(unit, min(D, tiling.row_tile) + 1, unit)
        if D % rows == 0 and (rows % group == 0 or group % rows == 0)
    ]
    columns, T = weight.num_columns, x.shape[0]
    return min(T, tiling.token_tile), min(columns, tiling.column_tile), max(fits, default=D)


def vmem_bytes(tiles: tuple[int, int, int], weight: QuantArray, operand: Any) -> int:
    """Return the kernel's bytes: each operand twice, sums, products, and the weights as
    multiplied."""
    tokens, columns, rows = tiles
    wide = -(-columns // LANES) * LANES
    groups = -(-weight.num_groups // 8) * 8 * (1 if weight.zeros is None else 2)
    size = jnp.dtype(operand).itemsize
    blocks = tokens * (rows * size + 4 * wide) + wide * (rows * weight.bits // 8 + 4 * groups)
    return 2 * blocks + 8 * tokens * wide + rows * wide * (size + 4)


def _room() -> int:
    return (15 if device_kind() in SMALL_VMEM else 48) * MEBI


def _operand(dtype: Any) -> Any:
    """Return the type in which numbers of an x of `dtype` are multiplied on the chip in use."""
    name = jnp.dtype(dtype).name
    kinds = MULTIPLIES.get(name)
    return name if kinds is None or device_kind().startswith(kinds) else "bfloat16"


def quantized_matmul(
    x,  # [T, D]
    weight: QuantArray,  # [D, F]
    *,
    x_scale,  # [T, 1] or None
    out_dtype,
    tiling: TpuQuantizedTiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return [T, F]. Declines (`NotImplementedError`) what Mosaic cannot compile."""
    operand = jnp.dtype(x.dtype).name if interpret else _operand(x.dtype)
    if not interpret and "float16" in (operand, out_dtype.name):
        raise NotImplementedError("Mosaic loads no float16; use bfloat16 or float32")
    key = tiling_key(x, weight)
    tiling = tiling or tuned(heuristic(x, weight), "quantized_matmul/tpu", key)
    tiles = _tiles(tiling, x, weight)
    vmem = vmem_bytes(tiles, weight, operand)
    if not interpret and vmem > _room():
        raise NotImplementedError(
            f"tiles of {vmem / MEBI:.1f} MiB (tokens, columns, rows {tiles}); VMEM has room for "
            f"{_room() / MEBI:.0f}: use groups that divide more of D = {weight.num_rows}"
        )
    plan = _plan(tiles, weight, operand, x_scale is not None)
    wide = lambda a: None if a is None else a.astype(jnp.float32)
    arrays = [x.astype(operand), weight.values, wide(weight.scales)]
    arrays += [wide(a) for a in (weight.zeros, x_scale) if a is not None]
    return _call(plan, tiles, vmem, out_dtype, interpret, x_scale is not None)(*arrays)


def _plan(tiles, weight: QuantArray, operand: Any, is_x_quantized: bool) -> TpuQuantizedPlan:
    """Return what the kernel is compiled for.

    Weights are scaled before the product where that costs less than scaling its sums, group by
    group, or where a group is too short for the multiplier. Not where x came quantized: it is as
    exact as its float32 scales, which bfloat16 weights would not be.
    """
    tokens, _, rows = tiles
    group = weight.group_size
    return TpuQuantizedPlan(
        operand=jnp.dtype(operand),
        row_tile=rows,
        group=group,
        half=weight.pack_rows // 2,
        middle=weight.middle if weight.zeros is None else 0,
        has_zeros=weight.zeros is not None,
        is_scaled_first=(not is_x_quantized and group < rows and (tokens > group or group < LANES)),
    )


def _call(plan: TpuQuantizedPlan, tiles, vmem: int, out_dtype, interpret, has_x_scale: bool):
    """Return the `pallas_call`; operands in the order of the kernel's."""
    tokens, columns, rows = tiles

    def run(x, values, scales, *rest):
        (T, D), F, groups = x.shape, values.shape[1], scales.shape[0]
        value_rows = rows * values.shape[0] // D
        scales_spec = pl.BlockSpec((groups, columns), lambda t, f, d: (0, f))
        specs = [
            pl.BlockSpec((tokens, rows), lambda t, f, d: (t, d)),
            pl.BlockSpec((value_rows, columns), lambda t, f, d: (d, f)),
            scales_spec,
            *([scales_spec] if plan.has_zeros else []),
            *([pl.BlockSpec((tokens, 1), lambda t, f, d: (t, 0))] if has_x_scale else []),
        ]
        scratch = [pltpu.VMEM((tokens, columns), jnp.float32)]
        if plan.makes_weights(values.dtype):
            scratch.append(pltpu.VMEM((rows, columns), plan.operand))
        moved = sum(a.size * a.dtype.itemsize for a in (x, values, scales, *rest))
        return pl.pallas_call(
            partial(kernel, plan, has_x_scale),
            grid=(pl.cdiv(T, tokens), pl.cdiv(F, columns), D // rows),
            in_specs=specs,
            out_specs=pl.BlockSpec((tokens, columns), lambda t, f, d: (t, f)),
            out_shape=jax.ShapeDtypeStruct((T, F), out_dtype),
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=max(16 * MEBI, vmem * 4 // 3),
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * T * D * F,
                bytes_accessed=moved + T * F * out_dtype.itemsize,
                transcendentals=0,
            ),
            interpret=interpret,
            name="quantized_matmul",
        )(x, values, scales, *rest)

    return run
