"""Quantized weights: `QuantArray`, a pytree that replaces an array [D, F], and its conversions.

A weight in row d and column f, of group j = d // group_size of that column's rows, is

    w[d, f] = (values[d, f] - zeros[j, f]) * scales[j, f]

with `zeros` read as the middle of the values where there are none: 8 for 4 bits, 0 otherwise. A
group as long as the column (group_size = D) is a scale for each output channel.

Four bits: two rows in a byte, `h = pack_rows / 2` rows apart. In each run of `pack_rows` rows, byte
row i holds row i of the run in its low half and row i + h in its high one. So a tile of at most h
byte rows is two tiles of whole, consecutive rows: it is unpacked by a mask and a shift, in place,
and multiplied with two slices of x. With the h of 128 that `quantize` takes where D allows, these
slices are whole registers of a TPU's 128 lanes.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxinfer.kernels.kv_pages import QUANTIZED

HALF_PACK = 128  # most rows between the two halves of a byte: the lanes of a TPU's register
FLOAT8_MAX = QUANTIZED["float8_e4m3fn"]
MIDDLE = 8  # the middle of the four-bit values 0..15


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros"],
    meta_fields=["bits", "group_size", "pack_rows"],
)
@dataclasses.dataclass(frozen=True)
class QuantArray:
    """A quantized weight [D, F]; the three arrays may share leading axes (experts, say).

    The meaning of the fields is in the module's text. `values` are int8 or float8_e4m3fn [D, F], or
    uint8 [D / 2, F] for 4 bits; `scales` and `zeros` (None: the middle) [D / group_size, F]. They
    are not checked here, since a pytree's leaves can be anything: `check` does it.
    """

    values: Any
    scales: Any
    zeros: Any
    bits: int
    group_size: int
    pack_rows: int = 0  # 8 bits: 0

    def __getitem__(self, index: Any) -> QuantArray:
        """Return `weight[i]`, one of several matrices by the leading axes; `weight[...]` is
        itself."""
        return jax.tree.map(lambda a: a[index], self)

    def columns(self, index: Any) -> QuantArray:
        """Return those columns as a weight [D, len(index)]."""
        return jax.tree.map(lambda a: a[..., index], self)

    @property
    def nbytes(self) -> int:
        arrays = (self.values, self.scales, self.zeros)
        return sum(a.size * a.dtype.itemsize for a in arrays if a is not None)

    @property
    def num_rows(self) -> int:
        """D."""
        return self.values.shape[-2] * (2 if self.bits == 4 else 1)

    @property
    def num_columns(self) -> int:
        """F."""
        return self.values.shape[-1]

    @property
    def num_groups(self) -> int:
        """Groups of a column."""
        return self.num_rows // self.group_size

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.values.dtype, jnp.floating)

    @property
    def middle(self) -> int:
        """The number subtracted from the values where `zeros` is None."""
        return MIDDLE if self.bits == 4 else 0

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight with its share of the scales and zeros."""
        arrays = [self.scales] if self.zeros is None else [self.scales, self.zeros]
        return self.bits / 8 + sum(a.dtype.itemsize for a in arrays) / self.group_size

    def check(self) -> None:
        """Raise `ValueError` where the fields do not fit together."""
        allowed = ("uint8",) if self.bits == 4 else ("int8", "float8_e4m3fn")
        if self.bits not in (4, 8) or jnp.dtype(self.values.dtype).name not in allowed:
            raise ValueError(
                f"values of {self.bits} bits are {self.values.dtype}; 4 bits are packed in uint8, "
                f"8 bits are int8 or float8_e4m3fn"
            )
        check_groups(self.num_rows, self.group_size)
        shape = (*self.values.shape[:-2], self.num_groups, self.num_columns)
        for name in ("scales", "zeros"):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} have shape {array.shape}; they must be {shape}")
        if self.is_float and self.zeros is not None:
            raise ValueError("float8 values have zeros; floating point needs none: pass None")
        half = self.pack_rows // 2
        if self.bits == 4 and (self.pack_rows < 2 or self.num_rows % (2 * half)):
            raise ValueError(f"pack_rows is {self.pack_rows}; it must divide D = {self.num_rows}")


def check_groups(num_rows: int, group_size: int) -> None:
    """Raise `ValueError` for groups that do not divide the rows."""
    if group_size < 1 or num_rows % group_size:
        raise ValueError(
            f"group_size is {group_size}; it must divide D = {num_rows} (D: a scale a column)"
        )


def pack_rows_for(num_rows: int) -> int:
    """Return twice the largest power of two, up to `HALF_PACK`, of which D is an even multiple.

    Raises `ValueError` for an odd D.
    """
    if num_rows % 2:
        raise ValueError(f"D is {num_rows}; 4 bits are packed by pairs of rows: pad D to even")
    half = num_rows // 2
    return 2 * min(HALF_PACK, half & -half)


def quantize(
    w: Float[Array | np.ndarray, "*E D F"],
    bits: int,
    group_size: int | None = None,
    has_zeros: bool = False,
    *,
    is_float: bool = False,
    scale_dtype: Any = np.float32,
) -> QuantArray:
    """Return the nearest `QuantArray` to `w`, each group by its own range; NumPy in, NumPy out.

    `group_size` None: a scale for each column. Without zeros the largest magnitude of a group
    becomes 7, 127 or (`is_float`, 8 bits: float8_e4m3fn) 448; with them, its range, made to hold 0,
    becomes all of the values'. Rounds half to even. Raises `ValueError` for a group that does not
    divide D, other bits than 4 and 8, and float8 with zeros or of 4 bits.
    """
    D, F = w.shape[-2:]
    group = D if group_size is None else group_size
    check_groups(D, group)
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; it must be 4 or 8")
    if is_float and (bits != 8 or has_zeros):
        raise ValueError(f"float8 has 8 bits and no zeros; got {bits} bits, zeros {has_zeros}")
    xp: Any = np if isinstance(w, np.ndarray) else jnp
    pack_rows = pack_rows_for(D) if bits == 4 else 0
    groups = w.astype(np.float32).reshape(*w.shape[:-2], D // group, group, F)
    lowest, highest = _value_range(bits, has_zeros, is_float)
    if has_zeros:
        bottom = xp.minimum(groups.min(axis=-2, keepdims=True), 0)
        scale = (xp.maximum(groups.max(axis=-2, keepdims=True), 0) - bottom) / (highest - lowest)
    else:
        bottom = None
        scale = abs(groups).max(axis=-2, keepdims=True) / highest
    scale = xp.where(scale == 0, 1, scale).astype(scale_dtype)
    wide = scale.astype(np.float32)
    zero = None if bottom is None else xp.clip(xp.rint(lowest - bottom / wide), lowest, highest)
    scaled = groups / wide + (0 if zero is None else zero)
    values = xp.clip(scaled if is_float else xp.rint(scaled), lowest, highest)
    values = values.reshape(w.shape)
    if bits == 4:
        values = pack((values + (0 if has_zeros else MIDDLE)).astype(np.uint8), pack_rows)
    else:
        values = values.astype(ml_dtypes.float8_e4m3fn if is_float else np.int8)
    zeros = None if zero is None else zero[..., 0, :].astype(scale_dtype)
    return QuantArray(values, scale[..., 0, :], zeros, bits, group, pack_rows)


def _value_range(bits: int, has_zeros: bool, is_float: bool) -> tuple[float, float]:
    if is_float:
        return -FLOAT8_MAX, FLOAT8_MAX
    if bits == 4:
        return (0.0, 15.0) if has_zeros else (-7.0, 7.0)
    return (-128.0, 127.0) if has_zeros else (-127.0, 127.0)


def dequantize(weight: QuantArray, dtype: Any = jnp.float32) -> Float[Array, "*E D F"]:
    """Return the weight that the values stand for, computed in float32 (float64 if `dtype` is)."""
    wide = jnp.promote_types(dtype, jnp.float32)
    values = unpack(jnp.asarray(weight.values), weight.pack_rows) if weight.bits == 4 else None
    values = jnp.asarray(weight.values if values is None else values).astype(wide)
    by_group = lambda x: jnp.asarray(x).astype(wide)[..., :, None, :]
    shape = values.shape
    values = values.reshape(*shape[:-2], weight.num_groups, weight.group_size, shape[-1])
    values = values - (weight.middle if weight.zeros is None else by_group(weight.zeros))
    return (values * by_group(weight.scales)).reshape(shape).astype(dtype)


def pack(
    values: UInt8[Array | np.ndarray, "*E D F"], pack_rows: int
) -> UInt8[Array | np.ndarray, "*E rows F"]:
    """Pack values 0..15, two in a byte; the order is in the module's text."""
    runs = values.reshape(*values.shape[:-2], -1, 2, pack_rows // 2, values.shape[-1])
    packed = runs[..., 0, :, :] | (runs[..., 1, :, :] << 4)
    return packed.reshape(*values.shape[:-2], values.shape[-2] // 2, values.shape[-1])


def unpack(
    packed: UInt8[Array | np.ndarray, "*E rows F"], pack_rows: int
) -> UInt8[Array | np.ndarray, "*E D F"]:
    """Unpack bytes to values 0..15, the inverse of `pack`."""
    xp: Any = np if isinstance(packed, np.ndarray) else jnp
    runs = packed.reshape(*packed.shape[:-2], -1, pack_rows // 2, packed.shape[-1])
    both = xp.stack([runs & 15, runs >> 4], axis=-3)
    return both.reshape(*packed.shape[:-2], packed.shape[-2] * 2, packed.shape[-1])
