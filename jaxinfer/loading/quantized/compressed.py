"""Read weights of the compressed-tensors library: int8, float8, and packed 4- or 8-bit integers.

For a linear layer X of D inputs and F outputs its files have:

    X.weight [F, D] int8 or float8_e4m3fn, or
    X.weight_packed [F, D * bits / 32] int32 with X.weight_shape [2], values plus 2 ** (bits - 1)
    X.weight_scale [F, groups], [F, 1], [1] or []
    X.weight_zero_point, of the scales' shape, or packed like the weight along the rows
    X.weight_g_idx [D]: the group of each input, if quantized with activation order (act-order)
    X.input_scale [1] or []: the scale of x, if it is static
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxinfer.loading.quantized.integers import unpack_integers
from jaxinfer.loading.quantized.rows import QuantRows, drop_default_zeros, input_order


def read_plain(
    weight: Shaped[np.ndarray, "F D"],
    scale: Float[np.ndarray, ...],
    zero_point: Shaped[np.ndarray, ...] | None = None,
    input_scale: Float[np.ndarray, ...] | None = None,
    *,
    activation_dtype: str | None = None,
) -> QuantRows:
    """Read int8 or float8 values, exactly, with one scale for each row, tensor, or group."""
    scales = _broadcast_scales(scale, len(weight))
    zeros = None
    if zero_point is not None:
        zeros = drop_default_zeros(_broadcast_scales(zero_point, len(weight)), 0)
    if zeros is not None:
        zeros = zeros.astype(scales.dtype)
    if input_scale is not None:
        input_scale = input_scale.astype(np.float32).reshape(())
    return QuantRows(
        weight, scales, zeros, 8, activation_dtype=activation_dtype, input_scale=input_scale
    )


def read_packed(
    packed: Int[np.ndarray, "F words"],
    scale: Float[np.ndarray, ...],
    shape: tuple[int, int],
    zero_point: Shaped[np.ndarray, ...] | None = None,
    g_idx: Int[np.ndarray, " D"] | None = None,
    *,
    bits: int,
) -> QuantRows:
    """Read packed integers, exactly. Raises `ValueError` for groups of different sizes."""
    F, D = shape
    values, scales = unpack_integers(packed, bits)[:, :D], _broadcast_scales(scale, F)
    if zero_point is not None and len(zero_point) != F:  # packed along the rows
        by_row = np.ascontiguousarray(zero_point.T)
        zero_point = unpack_integers(by_row, bits)[:, :F].T.astype(np.int16) - 2 ** (bits - 1)
    zeros = None if zero_point is None else _broadcast_scales(zero_point, F).astype(np.int16)
    if bits == 8:
        values = (values ^ 128).view(np.int8)
    elif zeros is not None:
        zeros = zeros + 8
    zeros = drop_default_zeros(zeros, default=8 if bits == 4 else 0)
    zeros = None if zeros is None else zeros.astype(scales.dtype)
    order = None
    if g_idx is not None and (g_idx >= 0).all():  # -1 means not set
        order = input_order(g_idx, scales.shape[1])
    if order is not None:
        values = values[:, order]
    return QuantRows(values, scales, zeros, bits, order=order)


def _broadcast_scales(stored: np.ndarray, num_rows: int) -> np.ndarray:
    """Broadcast scales of each group, of each row, or of the tensor, to [F, groups]."""
    if stored.dtype == ml_dtypes.float8_e8m0fnu:  # matmuls do not take scales of this type
        stored = stored.astype(np.float32)
    by_row = stored.reshape(-1, 1) if stored.ndim < 2 else stored
    return np.broadcast_to(by_row, (num_rows, by_row.shape[1]))
