"""A quantized weight as files store it, whatever the format: by rows, the inputs last.

`QuantArray` (`kernels/quantized_matmul`) is what it becomes on the device: [in, out], 4 bits packed
for kernels. Between the two stands the weight table's transform, which acts on values, scales and
zeros alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
CHUNK_ELEMENTS = 65_536  # dequantized at once: temporaries stay in the cache
FLOAT16_MAX = 65_504.0


@dataclasses.dataclass(frozen=True)
class QuantRows:
    """A weight [*E, out, in]: row o, input i, of group j = i // group_size, is

        w[o, i] = (values[o, i] - zeros[o, j]) * scales[o, j]

    `values` are int8, float8_e4m3fn, or uint8 of 0..15 where `bits` is 4; without `zeros` their
    middle is meant (8 of 4 bits, 0 otherwise). `in_axis` -2 says that all arrays stand the other
    way round, [*E, in, out]. With `order` [in], the weight's inputs stand in another order than
    x's: input i is x's number order[i]. `activation_dtype` says how the checkpoint wants x
    quantized (None: not at all), `input_scale` [] the scale of x where it is fixed.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    bits: int
    in_axis: int = -1
    order: np.ndarray | None = None
    activation_dtype: str | None = None
    input_scale: np.ndarray | None = None

    @property
    def num_groups(self) -> int:
        return self.scales.shape[self.in_axis]

    @property
    def group_size(self) -> int:
        return self.values.shape[self.in_axis] // self.num_groups

    @property
    def middle(self) -> int:
        return 8 if self.bits == 4 else 0

    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite."""
        arrays = [self.scales] if self.zeros is None else [self.scales, self.zeros]
        if not all(np.isfinite(a.astype(np.float32)).all() for a in arrays):
            return False
        # float8_e4m3fn has no infinity, and two NaNs.
        is_float = self.values.dtype == FLOAT8
        return not is_float or not ((self.values.view(np.uint8) & 0x7F) == 0x7F).any()

    def dequantize(self, dtype: np.dtype[Any]) -> np.ndarray:
        """The weight, its inputs in x's order, computed in float32."""
        by_rows = lambda a: np.moveaxis(a, self.in_axis, -1)
        values = by_rows(self.values)
        (*lead, num_inputs), groups = values.shape, self.num_groups
        values = values.reshape(-1, groups, self.group_size)
        scales = by_rows(self.scales).reshape(-1, groups, 1)
        zeros = None if self.zeros is None else by_rows(self.zeros).reshape(-1, groups, 1)
        out = np.empty((len(values), num_inputs), dtype)
        columns = slice(None) if self.order is None else self.order
        step = max(1, CHUNK_ELEMENTS // num_inputs)
        # Damaged scales overflow here; whoever loads the weights reports what is not finite.
        with np.errstate(all="ignore"):
            for first in range(0, len(values), step):
                rows = slice(first, first + step)
                wide = values[rows].astype(np.float32)
                wide -= self.middle if zeros is None else zeros[rows].astype(np.float32)
                wide *= scales[rows].astype(np.float32)
                out[rows, columns] = wide.reshape(-1, num_inputs)
        return np.moveaxis(out.reshape(*lead, num_inputs), -1, self.in_axis)


def from_minimum(
    values: np.ndarray, scales: np.ndarray, minimum: np.ndarray, bits: int
) -> QuantRows:
    """For formats that store `w = values * scale + minimum`: scales and zeros as float16.

    `scales` and `minimum` are float32 [*E, out, groups]. zero = -minimum / scale is rounded, and
    the scale where it is no float16: by 2 ** -11 at most, relative to the minimum and to the
    scale. A group without a scale, or with one far below its minimum, is the minimum throughout.
    """
    with np.errstate(all="ignore"):
        narrow = scales.astype(np.float16)
        zeros = -minimum / narrow.astype(np.float32)
        is_flat = (minimum != 0) & ~(abs(zeros) <= FLOAT16_MAX) & np.isfinite(minimum)
        zeros[(minimum == 0) & (narrow == 0)] = 0
        if is_flat.any():
            narrow = np.where(is_flat, minimum, narrow).astype(np.float16)
            zeros[is_flat] = -1
            groups = values.reshape(*scales.shape, -1).copy()
            groups[is_flat] = 0
            values = groups.reshape(values.shape)
        return QuantRows(values, narrow, zeros.astype(np.float16), bits)


def centred(zeros: np.ndarray | None, middle: int) -> np.ndarray | None:
    """`zeros`, or None where all are the middle of the values anyway."""
    return None if zeros is None or (zeros == middle).all() else zeros


def sorted_groups(g_idx: np.ndarray, groups: int) -> np.ndarray | None:
    """The order of inputs that puts those of a group side by side; None: they are so already.

    `g_idx` [in] is each input's group. Raises `ValueError` for groups of different sizes.
    """
    num_inputs = len(g_idx)
    wanted = np.arange(num_inputs) // max(1, num_inputs // groups)
    if np.array_equal(g_idx, wanted):
        return None
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], wanted):
        raise ValueError(f"{num_inputs} inputs are in {groups} groups of different sizes")
    return order
