"""Grouped products, rows by the matrix of their group: signature, formula, contract and checks.

The rows of x lie group by group, as a mixture of experts sorts its tokens (Switch Transformers,
arXiv:2101.03961; grouped products, MegaBlocks, arXiv:2211.15841):

    out[t] = x[t] @ weights[e]   for the group e with  sum(sizes[:e]) <= t < sum(sizes[:e + 1])
    out[t] = 0                   for t >= sum(sizes)

Groups may be empty and of any size. Rows past the last group may hold anything, NaN included; they
never reach the output.

The kernels work through a list of items, pairs of a tile of rows and a group that has rows in it;
there are at most T / tile + E, whatever the sizes are, so cost follows T and the experts in use. A
list that a program can make before it runs is the idea of MegaBlocks.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.grouped_matmul import gpu, reference, tpu, xla
from jaxinfer.kernels.grouped_matmul.weights import shape_of
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray

BACKENDS = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "tpu": tpu.grouped_matmul,
    "gpu": gpu.grouped_matmul,
}


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Float[Array, "E in_dim F"] | QuantArray,
    group_sizes: Int[Array, " groups"],
    *,
    backend: str | None = None,
) -> Float[Array, "T F"]:
    """Multiply each row of x by the matrix of its group; formula in the module's text.

    Sums are float32, the result has x's dtype. `group_sizes` [E] are not negative and their sum is
    at most T. A `QuantArray` of shape [E, D, F] is dequantized on the way to the product. Raises
    `ValueError` for shapes that do not fit together.
    """
    _check(x, weights, group_sizes)
    return dispatch("grouped_matmul", BACKENDS, backend, x, weights, group_sizes)


def _check(x, weights, group_sizes) -> None:
    if isinstance(weights, QuantArray):
        weights.check()
    num_axes = len(weights.values.shape if isinstance(weights, QuantArray) else weights.shape)
    if num_axes != 3:
        raise ValueError(f"weights have {num_axes} axes; they must have 3: (E, D, F)")
    E, D, _ = shape_of(weights)
    if x.shape[1] != D:
        raise ValueError(f"x has {x.shape[1]} columns, each matrix of the weights {D} rows")
    if group_sizes.shape != (E,):
        raise ValueError(f"group_sizes has shape {group_sizes.shape}; it must be {(E,)}")
    if not E or not x.shape[0]:
        raise ValueError(f"there are {x.shape[0]} rows and {E} groups; there must be some of each")
