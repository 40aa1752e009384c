"""Layers: parameters, products, norms and MLPs.

A parameter states its dimensions and their logical axes once (`parameter(dims, axes)`); sharding,
loading and quantization follow from them. A weight is stored as the matrix of its product, inputs
first: `[D, F]` for `x @ w`, `[D, N * H]` where the output is N heads. An array [D, N, H] has
another tiling on a TPU, and would be copied into that matrix at every step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.kernels.add_norm import add_layer_norm, add_rms_norm
from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.gated_mlp import gated_mlp
from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.kernels.quantized_matmul import QuantArray, dequantize
from jaxinfer.nn.quantized import (
    QuantPair,
    QuantWeight,
    gated_mlp_quantized,
    project_quantized,
    with_whole_token_scale,
)
from jaxinfer.sharding.collectives import all_sum, rank
from jaxinfer.sharding.products import exact_sum, sum_of_products
from jaxinfer.sharding.rules import ONE_DEVICE, Layout

FLOAT32 = np.dtype(np.float32)
Packs = Literal["matrix", "table"]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How a model computes.

    `dtype` is the type of weights and activations; norms, softmax and logits are float32 in any
    case. With `batch_invariant` a token's bits do not depend on the batch. `attention_backend`
    forces a backend by name. A module that is built with a `layout` computes with one device's
    parts of its arrays, inside `shard_map`.
    """

    dtype: np.dtype[Any] = FLOAT32
    batch_invariant: bool = False
    attention_backend: str | None = None
    layout: Layout = ONE_DEVICE

    def __post_init__(self):
        if self.layout.sums_in_order != self.batch_invariant and self.layout.num_devices > 1:
            layout = dataclasses.replace(self.layout, sums_in_order=self.batch_invariant)
            object.__setattr__(self, "layout", layout)


def parameter(
    dims: tuple[int, ...],
    axes: tuple[str, ...],
    numerics: Numerics,
    *,
    num_inputs: int | None = None,
    packs: Packs | None = None,
) -> nnx.Param:
    """Return a parameter of zeros: models are built abstractly and filled by the loader.

    If the layout splits the parameter, its array and its `dims` are one device's part. With
    `num_inputs` it is stored as a matrix: the first `num_inputs` of its `dims` by the others.
    `packs` says that a `QuantArray` [*E, inputs, outputs] may replace the array, and how the array
    itself is stored: "matrix" is [*E, inputs, outputs], "table" is [outputs, inputs].
    """
    assert len(dims) == len(axes), (dims, axes)
    shape = dims = numerics.layout.local(dims, axes)
    if num_inputs is not None:
        shape = (math.prod(dims[:num_inputs]), math.prod(dims[num_inputs:]))
    return nnx.Param(jnp.zeros(shape, numerics.dtype), axes=axes, dims=dims, packs=packs)


def project(
    x: Float[Array, "T inputs"],
    weight: jax.Array | QuantArray | QuantWeight,
    *,
    is_transposed=False,
    accumulate=None,
) -> Float[Array, "T outputs"]:
    """Return `x @ weight`, where weight is [inputs, outputs].

    With `is_transposed` an array is [outputs, inputs]; a quantized weight is [inputs, outputs] in
    any case. The result has x's dtype, or `accumulate` if it is given.
    """
    if isinstance(weight, QuantArray | QuantWeight):
        return project_quantized(x, weight, out_dtype=accumulate or x.dtype)
    contracted = ((1,), (1 if is_transposed else 0,))
    T = x.shape[0]
    if T == 1 and x.dtype != jnp.float32 and platform() == "cpu":
        # One row of bfloat16 is no matrix to XLA on CPU, and takes a path 20 times as slow.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    product = jax.lax.dot_general(
        x,
        weight,
        (contracted, ((), ())),
        preferred_element_type=accumulate or x.dtype,
    )
    return product[:T]


class Linear(nnx.Module):
    """`x @ weight + bias`, from [T, *inputs] to [T, *outputs]; `dims` are inputs, then outputs.

    Where the layout splits the inputs, each device's product is a part of a sum, and `__call__`
    returns the sum over the devices. Attention's output projection and the MLP's down projection
    are such products, the two all-reduces of a layer (Megatron-LM, arXiv:1909.08053, section 3).
    Split outputs stay split.
    """

    def __init__(
        self,
        dims: tuple[int, ...],
        axes: tuple[str, ...],
        numerics: Numerics,
        *,
        num_inputs: int = 1,
        has_bias: bool = False,
    ):
        layout = numerics.layout
        self.layout = layout
        self.outputs = layout.local(dims, axes)[num_inputs:]
        self.summed_over = tuple(a for axis in axes[:num_inputs] for a in layout.axes(axis))
        self.weight = parameter(dims, axes, numerics, num_inputs=num_inputs, packs="matrix")
        bias = (dims[num_inputs:], axes[num_inputs:])
        self.bias = parameter(*bias, numerics) if has_bias else None

    def __call__(self, x: jax.Array, *, accumulate=None) -> jax.Array:
        T = x.shape[0]
        product = functools.partial(project, accumulate=accumulate)
        x, weight, layout = x.reshape(T, -1), self.weight[...], self.layout
        scaled = with_whole_token_scale(x, weight, self.summed_over)
        if scaled is not weight:  # an overlap takes parts of the tokens, the scales all
            layout = dataclasses.replace(layout, overlaps=False)
        out = sum_of_products(product, x, scaled, layout, self.summed_over)
        out = out.reshape(T, *self.outputs)
        return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` (arXiv:1910.07467), computed in float32.

    `__call__` multiplies the rounded result by `scale`, as a post-norm whose output enters the
    residual stream times a constant.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        numerics: Numerics,
        *,
        offset: float = 0.0,
        axis: str = "model",
        scale: float = 1.0,
    ):
        self.eps = eps
        self.offset = offset
        self.scale = scale
        self.split_over = numerics.layout.axes(axis)
        self.sums_in_order = numerics.layout.sums_in_order
        self.dim = dim
        self.weight = parameter((dim,), (axis,), numerics)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        normed = self._norm_of_split(x) if self.split_over else self.add_norm(x, None)[0]
        return normed if self.scale == 1 else normed * self.scale

    def _norm_of_split(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the norm of vectors that the layout splits; the mean is over all parts."""
        wide = x.astype(jnp.float32)
        part = (wide * wide).sum(axis=-1, keepdims=True)
        total = exact_sum(part, self.split_over, in_order=self.sums_in_order)
        normed = wide * jax.lax.rsqrt(total / self.dim + self.eps)
        return (normed * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)

    def add_norm(
        self, update: Float[Array, "T D"], residual: Float[Array, "T D"] | None
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Return the norm of `residual + update`, and that sum, the new residual stream."""
        normed: Any
        normed, total = add_rms_norm(
            update, residual, self.weight[...], eps=self.eps, offset=self.offset
        )
        return normed, total


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(var + eps) * weight + bias` (arXiv:1607.06450), computed in float32."""

    def __init__(self, dim: int, eps: float, numerics: Numerics):
        self.eps = eps
        self.weight = parameter((dim,), ("model",), numerics)
        self.bias = parameter((dim,), ("model",), numerics)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.add_norm(x, None)[0]

    def add_norm(
        self, update: Float[Array, "T D"], residual: Float[Array, "T D"] | None
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Return the norm of `residual + update`, and that sum, the new residual stream."""
        normed: Any
        normed, total = add_layer_norm(
            update, residual, self.weight[...], self.bias[...], eps=self.eps
        )
        return normed, total


class NoNorm(nnx.Module):
    """A replacement for an absent norm; `__call__` returns its input times `scale`."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x if self.scale == 1 else x * self.scale

    def add_norm(
        self, update: Float[Array, "T D"], residual: Float[Array, "T D"] | None
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Return the sum `residual + update` twice: for the next layer, and as the stream."""
        total = update if residual is None else residual + update
        return total, total


class Embedding(nnx.Module):
    """The table of token vectors [V, D]; `logits` is the tied head.

    A quantized table is a `QuantArray` [D, V], the matrix of the head's product.
    """

    def __init__(self, vocab_size: int, dim: int, numerics: Numerics):
        self.dtype = numerics.dtype
        self.split_over = numerics.layout.axes("vocab")
        self.weight = parameter((vocab_size, dim), ("vocab", "model"), numerics, packs="table")

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return the tokens' vectors [T, D].

        With a split table each device looks up the tokens of its part, and the results are added.
        """
        if not self.split_over:
            return self._rows(token_ids)
        weight = self.weight[...]
        num_local = weight.num_columns if isinstance(weight, QuantArray) else weight.shape[0]
        index = token_ids - rank(self.split_over) * jnp.int32(num_local)
        is_local = (index >= 0) & (index < num_local)
        rows = jnp.where(is_local[:, None], self._rows(jnp.where(is_local, index, 0)), 0)
        return all_sum(rows, self.split_over)

    def _rows(self, token_ids: jax.Array) -> jax.Array:
        weight = self.weight[...]
        if isinstance(weight, QuantArray):
            return dequantize(weight.columns(token_ids), self.dtype).T
        return weight[token_ids]

    def logits(self, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        return project(x, self.weight[...], is_transposed=True, accumulate=jnp.float32)


class GatedMLP(nnx.Module):
    """`(act(x @ gate) * (x @ up)) @ down` (GLU variants, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int, activation: str, numerics: Numerics, *, bias: bool):
        self.activation = activation
        D, F = dim, ffn_dim
        self.gate_up = parameter((2, D, F), ("half", "model", "ffn"), numerics, packs="matrix")
        self.gate_up_bias = parameter((2, F), ("half", "ffn"), numerics) if bias else None
        self.down = Linear((F, D), ("ffn", "model"), numerics, has_bias=bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        bias = None if self.gate_up_bias is None else self.gate_up_bias[...]
        gate_up = self.gate_up[...]
        if isinstance(gate_up, QuantPair):
            return self.down(gated_mlp_quantized(x, gate_up, self.activation, bias))
        return self.down(gated_mlp(x, gate_up, activation=self.activation, bias=bias))


class MLP(nnx.Module):
    """`act(x @ up + up_bias) @ down + down_bias`, the feed-forward layer of arXiv:1706.03762."""

    def __init__(self, dim: int, ffn_dim: int, activation: str, numerics: Numerics):
        self.activation = activation
        self.up = Linear((dim, ffn_dim), ("model", "ffn"), numerics, has_bias=True)
        self.down = Linear((ffn_dim, dim), ("ffn", "model"), numerics, has_bias=True)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))
