"""A tile of a weight in a TPU's VMEM, quantized or not, for kernels that multiply with it.

The weight has one axis in front (experts; gate and up). Its arrays are the operands of a
`pallas_call`: the weight alone, or values, scales and zeros of a `QuantArray`, whose tile becomes
numbers of the activations' type in VMEM, so that only the narrow ones are read from HBM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.grouped_matmul.weights import shape_of
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray
from jaxinfer.kernels.tpu_chips import MEBI, SMALL_VMEM

LANES = 128
SUBLANES = 8  # rows of a tile of 32-bit numbers
NARROW_ROWS = 32  # rows of a tile of 8-bit numbers


@dataclasses.dataclass(frozen=True)
class WeightTile:
    """A tile of `rows` of D by `columns` of F of `lead` matrices, and how it is stored."""

    lead: int | None  # None: one matrix, its axis dropped
    rows: int
    columns: int
    bits: int = 0  # 0: not quantized
    group_rows: int = 0  # rows of a scale in the tile
    half: int = 0  # 4 bits: rows between the halves of a byte
    middle: int = 0
    has_zeros: bool = False
    is_by_column: bool = False  # one scale for all of D, the same in every tile of a column

    @property
    def num_operands(self) -> int:
        return 1 if not self.bits else 3 if self.has_zeros else 2

    def specs(self, index: Callable[..., tuple[Any, Any, Any]]) -> list[pl.BlockSpec]:
        """Return the operands' block specs; `index` gives the tile's (lead, row tile, column
        tile)."""
        if not self.bits:
            return [pl.BlockSpec((self.lead, self.rows, self.columns), index)]
        stored = self.rows // 2 if self.bits == 4 else self.rows
        scales = (self.lead, self.rows // self.group_rows, self.columns)

        def index_of_scales(*step):
            lead, row, column = index(*step)
            return lead, 0 if self.is_by_column else row, column

        values = pl.BlockSpec((self.lead, stored, self.columns), index)
        return [values] + [pl.BlockSpec(scales, index_of_scales)] * (self.num_operands - 1)

    def load(self, refs, at: tuple[Any, ...], dtype) -> jax.Array:
        """Return the tile [rows, columns] in `dtype`; `at` picks a matrix of several: (0,), (1,) or
        ()."""
        values = refs[0][at or ...]
        if not self.bits:
            return values.astype(dtype)
        if self.bits == 4:
            runs = values.astype(jnp.int32).reshape(-1, self.half, self.columns)
            values = jnp.stack([runs & 15, runs >> 4], axis=1)
        wide = values.astype(jnp.float32).reshape(-1, self.group_rows, self.columns)
        by_group = lambda ref: ref[at or ...].astype(jnp.float32)[:, None]
        zeros = by_group(refs[2]) if self.has_zeros else self.middle
        wide = (wide - zeros) * by_group(refs[1])
        return wide.reshape(self.rows, self.columns).astype(dtype)

    def vmem_bytes(self, weight) -> int:
        """Return the bytes of two buffers.

        The compiler feeds dequantized numbers to the product as they are made: a tile of
        2 x 2048 x 512 int8 took no VMEM beside its buffers (compiled for a v5e)."""
        count = (self.lead or 1) * self.rows * self.columns
        if not self.bits:
            return 2 * count * weight.dtype.itemsize
        return int(2 * count * (self.bits / 8 + 8 / self.group_rows))


def tile_of(weight, lead: int | None, rows: int, columns: int) -> WeightTile:
    """Return the tile of a weight; `rows` from `rows_for`."""
    if not isinstance(weight, QuantArray):
        return WeightTile(lead, rows, columns)
    return WeightTile(
        lead,
        rows,
        columns,
        weight.bits,
        min(weight.group_size, rows),
        weight.pack_rows // 2,
        weight.middle,
        weight.zeros is not None,
        weight.num_groups == 1,
    )


def rows_for(weight, most: int) -> int:
    """Return the largest number of rows, up to `most`, whose tiles cover D exactly and are stored
    in whole registers; D where there is none."""
    D = shape_of(weight)[1]
    step = LANES
    if isinstance(weight, QuantArray):
        step = max(step, weight.pack_rows)
        if weight.group_size < D:
            step = max(step, SUBLANES * weight.group_size)
    fitting = [rows for rows in range(step, most + 1, step) if D % rows == 0]
    return max(fitting, default=D)


def check_weight(weight) -> None:
    """Raise `NotImplementedError` for a weight that `WeightTile.load` cannot read."""
    if not isinstance(weight, QuantArray):
        if weight.dtype == jnp.float16:
            raise NotImplementedError("Mosaic loads no float16; use bfloat16 or float32 weights")
        return
    if weight.is_float:
        raise NotImplementedError("float8 weights are not read here; use int8, or backend xla")
    if weight.group_size % SUBLANES:
        raise NotImplementedError(
            f"groups of {weight.group_size} rows; they must be a multiple of {SUBLANES}"
        )
    if weight.bits == 4 and weight.pack_rows // 2 % SUBLANES:
        raise NotImplementedError(
            f"bytes hold rows {weight.pack_rows // 2} apart; it must be a multiple of {SUBLANES}"
        )


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return [t, d] by [d, f] in float32, with full precision for float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot(x, w, precision=precision, preferred_element_type=jnp.float32)


def room() -> int:
    """Return the bytes of VMEM that a kernel's own arrays may take."""
    return (12 if device_kind() in SMALL_VMEM else 48) * MEBI


def check_mosaic(x, weight, needed: int) -> None:
    """Raise `NotImplementedError` for what Mosaic cannot compile; `needed` is bytes of VMEM."""
    check_weight(weight)
    if x.dtype == jnp.float16:
        raise NotImplementedError("Mosaic loads no float16; use bfloat16 or float32")
    if needed > room():
        raise NotImplementedError(
            f"tiles of {needed / MEBI:.1f} MiB; VMEM has room for {room() // MEBI}: "
            f"D has no divisor that is a multiple of {LANES}"
        )
