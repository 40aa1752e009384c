"""Access to weights [E, D, F], plain or quantized."""

from __future__ import annotations

import jax

from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray


def operands(weight) -> tuple[jax.Array, ...]:
    """Return the arrays of a weight, values first."""
    if not isinstance(weight, QuantArray):
        return (weight,)
    arrays = (weight.values, weight.scales, weight.zeros)
    return tuple(array for array in arrays if array is not None)


def shape_of(weight) -> tuple[int, int, int]:
    """Return (E, D, F), however the weight is stored."""
    if isinstance(weight, QuantArray):
        return weight.values.shape[0], weight.num_rows, weight.num_columns
    return weight.shape
