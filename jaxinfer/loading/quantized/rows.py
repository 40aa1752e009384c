"""`QuantRows`: a quantized weight as files of any format store it, by rows with the inputs last.

On the device it becomes a `QuantArray` (`kernels/quantized_matmul`): [in, out], with 4-bit values
packed for the kernels. In between, the weight table's transform is applied to values, scales and
zeros alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
CHUNK_ELEMENTS = 65_536  # dequantized at once, so that temporaries stay in the cache
FLOAT16_MAX = 65_504.0


@dataclasses.dataclass(frozen=True)
class QuantRows:
    """A weight [*E, out, in]: row o, input i, of group j = i // group_size, is

        w[o, i] = (values[o, i] - zeros[o, j]) * scales[o, j]

    `values` are int8, float8_e4m3fn, or uint8 in 0..15 if `bits` is 4. Without `zeros` the zero
    point is the middle of the range: 8 for 4 bits, 0 otherwise. If `in_axis` is -2, all arrays are
    transposed, [*E, in, out]. With `order` [in], the weight's inputs are reordered: input i
    multiplies x[order[i]]. `activation_dtype` is the type to which the checkpoint quantizes x (None
    if it does not), `input_scale` [] the scale of x if it is static.
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
        """Whether all weights are finite."""
        arrays = [self.scales] if self.zeros is None else [self.scales, self.zeros]
        if not all(np.isfinite(a.astype(np.float32)).all() for a in arrays):
            return False
        # float8_e4m3fn has no infinity, and two NaN values.
        is_float = self.values.dtype == FLOAT8
        return not is_float or not ((self.values.view(np.uint8) & 0x7F) == 0x7F).any()

    def dequantize(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Dequantize the weight in float32, with its inputs in the order of x."""
        by_rows = lambda a: np.moveaxis(a, self.in_axis, -1)
        values = by_rows(self.values)
        (*lead, num_inputs), groups = values.shape, self.num_groups
        values = values.reshape(-1, groups, self.group_size)
        scales = by_rows(self.scales).reshape(-1, groups, 1)
        zeros = None if self.zeros is None else by_rows(self.zeros).reshape(-1, groups, 1)
        out = np.empty((len(values), num_inputs), dtype)
        columns = slice(None) if self.order is None else self.order
        step = max(1, CHUNK_ELEMENTS // num_inputs)
        # Damaged scales overflow here; loading reports the weights that are not finite.
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
    """Convert formats that store `w = values * scale + minimum` to float16 scales and zeros.

    `scales` and `minimum` are float32 [*E, out, groups]. zero = -minimum / scale is rounded, and so
    is a scale that is not a float16: by at most 2 ** -11, relative to the minimum and the scale. A
    group whose scale is 0 or far below its minimum becomes the minimum throughout.
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


def drop_default_zeros(zeros: np.ndarray | None, default: int) -> np.ndarray | None:
    """Return `zeros`, or None if all of them are the default zero point."""
    return None if zeros is None or (zeros == default).all() else zeros


def input_order(g_idx: np.ndarray, groups: int) -> np.ndarray | None:
    """Return the order of inputs that makes each group contiguous, or None if they already are.

    `g_idx` [in] is the group of each input. Raises `ValueError` for groups of different sizes.
    """
    num_inputs = len(g_idx)
    sorted_idx = np.arange(num_inputs) // max(1, num_inputs // groups)
    if np.array_equal(g_idx, sorted_idx):
        return None
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], sorted_idx):
        raise ValueError(f"{num_inputs} inputs are in {groups} groups of different sizes")
    return order
