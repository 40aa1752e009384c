"""Pack a file's quantized tensors into one quantized parameter, in the layout of its matmul.

A weight table's transform of the rows (the outputs: a slice of a fused tensor, another order) is
applied to values, scales and zeros alike. Where that is not possible, `UnpackableError` says why,
and the parameter is dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, pack, pack_rows_for
from jaxinfer.loading.quantized.rows import QuantRows
from jaxinfer.loading.splitting import UnpackableError
from jaxinfer.models.family import Shape, Transform
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight


def pack_parameter(
    spec: ParameterSpec, parts: Sequence[QuantRows], transform: Transform, dims: Shape
) -> Quantized:
    """Pack one stored tensor, or one for each item of the first axis, into a parameter.

    The result's arrays are NumPy's. `dims` are the dimensions of one part. Raises
    `UnpackableError`.
    """
    first = parts[0]
    is_stored_outputs_first = transform.is_matrix or spec.packs == "table"
    if not (transform.is_matrix or transform.keeps_inputs) or (
        first.in_axis != (-1 if is_stored_outputs_first else -2)
    ):
        raise UnpackableError("its stored inputs are cut or reordered")
    scheme = lambda part: (part.bits, part.values.dtype, part.group_size, part.activation_dtype)
    if any(scheme(part) != scheme(first) for part in parts):
        raise UnpackableError("its parts are quantized in different ways")
    if first.bits == 4 and first.values.shape[first.in_axis] % 2:
        raise UnpackableError("it has an odd number of inputs, and 4 bits are packed in pairs")
    is_stacked = len(dims) < len(spec.dims)
    shape = spec.shape[1:] if is_stacked else spec.shape

    def to_rows(arrays: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
        """Return the parts as one [*E, num_rows, outputs]; `num_rows` counts inputs or groups."""
        items = [_to_rows(a, transform, dims, shape, num_rows, spec.packs) for a in arrays]
        return np.stack(items) if is_stacked else np.ascontiguousarray(items[0])

    values = to_rows([part.values for part in parts], first.values.shape[first.in_axis])
    scales = to_rows([part.scales for part in parts], first.num_groups)
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = to_rows([_explicit_zeros(part) for part in parts], first.num_groups)
    pack_rows = 0
    if first.bits == 4:
        pack_rows = pack_rows_for(values.shape[-2])
        values = pack(values, pack_rows)
    weight = QuantArray(values, scales, zeros, first.bits, first.group_size, pack_rows)
    return _with_activations(weight, parts, spec.axes[0] == "half")


def _explicit_zeros(part: QuantRows) -> np.ndarray:
    if part.zeros is not None:
        return part.zeros
    return np.full(part.scales.shape, part.middle, part.scales.dtype)


def _to_rows(
    stored: np.ndarray,
    transform: Transform,
    dims: Shape,
    shape: Shape,
    num_rows: int,
    packs: str | None,
) -> np.ndarray:
    """Apply the weight table's transform to one array of one part: [*E, num_rows, outputs]."""
    if packs == "table":  # [outputs, inputs], as stored
        return transform.read(stored, (*dims[:-1], num_rows)).T
    num_lead = len(shape) - 2
    end, inputs = num_lead, 1
    while inputs < shape[-2]:
        inputs *= dims[end]
        end += 1
    ones = (1,) * (end - num_lead - 1)
    expected = (*dims[:num_lead], num_rows, *ones, *dims[end:])
    array = transform.read(stored, expected)
    return array.reshape(*shape[:-2], num_rows, math.prod(dims[end:]))


def _with_activations(weight: QuantArray, parts: Sequence[QuantRows], is_pair: bool) -> Quantized:
    """Attach the quantization of x and the order of the inputs, if the parts have any.

    `is_pair` marks a gate-and-up weight, which comes from two parts or from one that has both.
    """
    first = parts[0]
    has_order = any(part.order is not None for part in parts)
    if not has_order and first.activation_dtype is None:
        return weight
    if weight.values.ndim > 2 and not is_pair:
        # The experts' matmul (`kernels/grouped_matmul`) takes x unquantized and in its own order.
        if has_order:
            raise UnpackableError("each expert's inputs are reordered (act-order)")
        return weight
    in_order = np.arange(weight.num_rows, dtype=np.int32) if has_order else None

    def with_activations(matrix: QuantArray, part: QuantRows) -> QuantWeight:
        order = in_order if part.order is None else part.order
        return QuantWeight(matrix, order, part.input_scale, first.activation_dtype)

    if is_pair:
        return QuantPair(
            with_activations(weight[0], parts[0]), with_activations(weight[1], parts[-1])
        )
    return with_activations(weight, first)
