"""Weights [E, D, F], plain or quantized, seen alike."""

from __future__ import annotations

import jax

from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray


def operands(weight) -> tuple[jax.Array, ...]:
    """The arrays of a weight, values first."""
    if not isinstance(weight, QuantArray):
        return (weight,)
    arrays = (weight.values, weight.scales, weight.zeros)
    return tuple(array for array in arrays if array is not None)


def shape_of(weight) -> tuple[int, int, int]:
    """[E, D, F], whatever it is stored as."""
    if isinstance(weight, QuantArray):
        return weight.values.shape[0], weight.num_rows, weight.num_columns
    return weight.shape
