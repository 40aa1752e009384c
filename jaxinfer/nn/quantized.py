"""Products with quantized weights that need more than a `QuantArray`.

A `QuantArray` in a parameter's place is multiplied with floating-point x. A `QuantWeight` takes x
in another order or quantized: int8 or float8 weights with activations of the same type ("W8A8"),
and weights that were quantized in the order of their activations' size (GPTQ's `desc_act`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.kernels.kv_pages import QUANTIZED
from jaxinfer.kernels.quantized_matmul import QuantArray, quantized_matmul
from jaxinfer.sharding.collectives import Axes, all_max


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "order", "x_scale"],
    meta_fields=["activation_dtype"],
)
@dataclasses.dataclass(frozen=True)
class QuantWeight:
    """A weight [D, F] whose row d multiplies `x[order[d]]` (without `order`, `x[d]`).

    With `activation_dtype`, x is quantized token by token, or by `x_scale` if it is given.
    """

    weight: QuantArray
    order: Any = None  # int32 [D]
    x_scale: Any = None  # float32 [], or [T, 1] inside a step
    activation_dtype: Any = None

    def __getitem__(self, index: Any) -> QuantWeight:
        """Index every array; `[...]` returns an equal value, as it does for an array."""
        return jax.tree.map(lambda a: a[index], self)

    @property
    def nbytes(self) -> int:
        arrays = (self.order, self.x_scale)
        return self.weight.nbytes + sum(a.nbytes for a in arrays if a is not None)


@partial(jax.tree_util.register_dataclass, data_fields=["gate", "up"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class QuantPair:
    """Gate and up as separate weights.

    As one array [2, D, F], each half was copied at every step before a GPU kernel could read it
    (compiled for an H100).
    """

    gate: QuantWeight
    up: QuantWeight

    def __getitem__(self, index: Any) -> QuantPair:
        """Index every array; `[...]` returns an equal value, as it does for an array."""
        return jax.tree.map(lambda a: a[index], self)

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes


# Types that may replace a parameter's array.
Quantized = QuantArray | QuantWeight | QuantPair


def project_quantized(
    x: Float[Array, "T D"], weight: QuantArray | QuantWeight, *, out_dtype: Any
) -> Float[Array, "T F"]:
    """Return `x @ weight`, summed in float32."""
    if isinstance(weight, QuantArray):
        return quantized_matmul(x, weight, out_dtype=out_dtype)
    if weight.order is not None:
        x = x[:, weight.order]
    if weight.x_scale is None:
        return quantized_matmul(
            x, weight.weight, activation_dtype=weight.activation_dtype, out_dtype=out_dtype
        )
    values = _rounded(x.astype(jnp.float32) / weight.x_scale, weight.activation_dtype)
    x_scale = jnp.broadcast_to(weight.x_scale, (x.shape[0], 1))
    return quantized_matmul(values, weight.weight, x_scale=x_scale, out_dtype=out_dtype)


def with_whole_token_scale(x: Float[Array, "T D"], weight: Any, axes: Axes) -> Any:
    """Return the weight with the scales of whole tokens, where `axes` split each token's numbers.

    Every device then quantizes its part of a token by the same scale as one device would. A weight
    that does not quantize x token by token is returned unchanged.
    """
    is_by_token = isinstance(weight, QuantWeight) and weight.x_scale is None
    if not axes or not is_by_token or weight.activation_dtype is None:
        return weight
    top = all_max(abs(x.astype(jnp.float32)).max(axis=1, keepdims=True), axes)
    scale = jnp.where(top == 0, 1, top / QUANTIZED[weight.activation_dtype])
    return dataclasses.replace(weight, x_scale=scale)


def gated_mlp_quantized(
    x: Float[Array, "T D"],
    gate_up: QuantPair,
    activation: str,
    bias: Float[Array, "two F"] | None,
) -> Float[Array, "T F"]:
    """Return `act(x @ gate) * (x @ up)` in x's dtype, by two products.

    The fused kernel (`kernels/gated_mlp`) does not quantize x.
    """
    product = lambda weight: project_quantized(x, weight, out_dtype=jnp.float32)
    gate, up = product(gate_up.gate), product(gate_up.up)
    if bias is not None:
        gate, up = gate + bias[0].astype(jnp.float32), up + bias[1].astype(jnp.float32)
    return (ACTIVATIONS[activation](gate) * up).astype(x.dtype)


def _rounded(x: jax.Array, dtype: str) -> jax.Array:
    largest = QUANTIZED[dtype]
    return jnp.clip(jnp.rint(x) if dtype == "int8" else x, -largest, largest).astype(dtype)
