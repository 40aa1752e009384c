"""From quantized tensors of a file to one quantized parameter, as its product takes it.

What a weight table does to rows (outputs: a part of a fused tensor, another order) is done to
values, scales and zeros alike. Where that is not possible `Unpackable` says why, and the parameter
is dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, pack, pack_rows_for
from jaxinfer.loading.quantized.rows import QuantRows
from jaxinfer.loading.splitting import Unpackable
from jaxinfer.models.family import Shape, Transform
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight


def pack_parameter(
    spec: ParameterSpec, parts: Sequence[QuantRows], transform: Transform, dims: Shape
) -> Quantized:
    """A parameter in NumPy arrays, from one stored tensor, or one for each item of its first axis.

    `dims` are a part's. Raises `Unpackable`.
    """
    first = parts[0]
    is_stored_outputs_first = transform.is_matrix or spec.packs == "table"
    if not (transform.is_matrix or transform.keeps_inputs) or (
        first.in_axis != (-1 if is_stored_outputs_first else -2)
    ):
        raise Unpackable("its stored inputs are cut or reordered")
    kind = lambda part: (part.bits, part.values.dtype, part.group_size, part.activation_dtype)
    if any(kind(part) != kind(first) for part in parts):
        raise Unpackable("its parts are quantized in different ways")
    if first.bits == 4 and first.values.shape[first.in_axis] % 2:
        raise Unpackable("it has an odd number of inputs, and 4 bits are packed in pairs")
    is_stacked = len(dims) < len(spec.dims)
    shape = spec.shape[1:] if is_stacked else spec.shape

    def turned(arrays: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
        """[*E, num_rows, outputs] of all parts, `num_rows` being inputs or groups."""
        items = [_turn(a, transform, dims, shape, num_rows, spec.packs) for a in arrays]
        return np.stack(items) if is_stacked else np.ascontiguousarray(items[0])

    values = turned([part.values for part in parts], first.values.shape[first.in_axis])
    scales = turned([part.scales for part in parts], first.num_groups)
    zeros = None
    if any(part.zeros is not None for part in parts):
        filled = [_zeros(part) for part in parts]
        zeros = turned(filled, first.num_groups)
    pack_rows = 0
    if first.bits == 4:
        pack_rows = pack_rows_for(values.shape[-2])
        values = pack(values, pack_rows)
    weight = QuantArray(values, scales, zeros, first.bits, first.group_size, pack_rows)
    return _with_activations(weight, parts, spec.axes[0] == "half")


def _zeros(part: QuantRows) -> np.ndarray:
    if part.zeros is not None:
        return part.zeros
    return np.full(part.scales.shape, part.middle, part.scales.dtype)


def _turn(
    stored: np.ndarray,
    transform: Transform,
    dims: Shape,
    shape: Shape,
    num_rows: int,
    packs: str | None,
) -> np.ndarray:
    """One array of one part, [*E, num_rows, outputs], by the table's transform."""
    if packs == "table":  # [outputs, inputs], as stored
        return transform.read(stored, (*dims[:-1], num_rows)).T
    num_lead = len(shape) - 2
    end, inputs = num_lead, 1
    while inputs < shape[-2]:
        inputs *= dims[end]
        end += 1
    ones = (1,) * (end - num_lead - 1)
    wanted = (*dims[:num_lead], num_rows, *ones, *dims[end:])
    turned = transform.read(stored, wanted)
    return turned.reshape(*shape[:-2], num_rows, math.prod(dims[end:]))


def _with_activations(weight: QuantArray, parts: Sequence[QuantRows], is_pair: bool) -> Quantized:
    """The weight alone where its product takes x as it is. `is_pair`: gate and up, from two parts
    or from one that holds both."""
    first = parts[0]
    has_order = any(part.order is not None for part in parts)
    if not has_order and first.activation_dtype is None:
        return weight
    if weight.values.ndim > 2 and not is_pair:
        # Experts: their product (`kernels/grouped_matmul`) takes x as it is.
        if has_order:
            raise Unpackable("its inputs stand in an order of their own, expert by expert")
        return weight
    in_order = np.arange(weight.num_rows, dtype=np.int32) if has_order else None

    def of_part(matrix: QuantArray, part: QuantRows) -> QuantWeight:
        order = in_order if part.order is None else part.order
        return QuantWeight(matrix, order, part.input_scale, first.activation_dtype)

    if is_pair:
        return QuantPair(of_part(weight[0], parts[0]), of_part(weight[1], parts[-1]))
    return of_part(weight, first)
