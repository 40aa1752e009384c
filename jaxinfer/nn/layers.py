"""Layers: parameters, products, norms. None knows a platform, a phase or a training switch.

A parameter states its logical axes once (`parameter(shape, axes)`); sharding, loading and
quantization derive from that. Weights are stored input dimension first, `[D, F]` for `x @ w`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.paged_attention.api import INVARIANT_TILE

FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How a model computes: the type of weights and activations, whether bits may depend on the
    batch, and the attention backend where one is forced by name. Norms, softmax and logits are
    float32 whatever `dtype` says."""

    dtype: np.dtype[Any] = FLOAT32
    batch_invariant: bool = False
    attention_backend: str | None = None


def parameter(shape: tuple[int, ...], axes: tuple[str, ...], numerics: Numerics) -> nnx.Param:
    """A parameter of zeros: models are built abstractly and filled by the loader."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jnp.zeros(shape, numerics.dtype), axes=axes)


def tokenwise(numerics: Numerics, function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """`function(*arrays)`, where axis 0 of all arrays and results is the tokens, each on its own.

    In the batch-invariant mode the tokens go through in tiles of `INVARIANT_TILE`: whatever came
    with a token, its arithmetic is that of one and the same loop body, so its bits are the same.
    """
    if not numerics.batch_invariant:
        return function(*arrays)
    T, tile = arrays[0].shape[0], INVARIANT_TILE

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -T % tile)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, tile, *x.shape[1:])

    tiles = jax.lax.map(lambda parts: function(*parts), tuple(map(cut, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:T], tiles)


def project(x: jax.Array, weight: jax.Array, *, is_transposed=False, accumulate=None) -> jax.Array:
    """`x [T, *in] @ weight [*in, *out] -> [T, *out]`: the one product of the models.

    With `is_transposed` the weight is [out, in]. The result has x's dtype, or `accumulate`.
    """
    in_dims, out_shape = x.ndim - 1, weight.shape[x.ndim - 1 :]
    if is_transposed:
        in_dims, out_shape = 1, weight.shape[:1]
    else:
        # One contracted axis: of two, XLA on CPU transposes the weight anew at every step.
        weight = weight.reshape(math.prod(weight.shape[:in_dims]), -1)
    contracted = ((1,), (1 if is_transposed else 0,))
    T, x = x.shape[0], x.reshape(x.shape[0], -1)
    if T == 1 and x.dtype != jnp.float32 and platform() == "cpu":
        # One row of bfloat16 is no matrix to XLA on CPU, and takes a path 20 times as slow.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    product = jax.lax.dot_general(
        x,
        weight,
        (contracted, ((), ())),
        preferred_element_type=accumulate or x.dtype,
    )
    return product[:T].reshape(-1, *out_shape)


class Linear(nnx.Module):
    """`project(x, weight) + bias`; the weight's shape is its input axes, then its output axes."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        numerics: Numerics,
        *,
        bias_dims: tuple[int, ...] = (),
    ):
        """`bias_dims` names the weight's axes that the bias has; empty: no bias."""
        self.weight = parameter(shape, axes, numerics)
        bias_shape = tuple(shape[i] for i in bias_dims)
        bias_axes = tuple(axes[i] for i in bias_dims)
        self.bias = parameter(bias_shape, bias_axes, numerics) if bias_dims else None

    def __call__(self, x: jax.Array, *, accumulate=None) -> jax.Array:
        out = project(x, self.weight[...], accumulate=accumulate)
        return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv:1910.07467), computed in float32."""

    def __init__(self, dim: int, eps: float, numerics: Numerics):
        self.eps = eps
        self.weight = parameter((dim,), ("model",), numerics)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * self.weight[...]


class Embedding(nnx.Module):
    """Token vectors [V, D]; `logits` is the tied head."""

    def __init__(self, vocab_size: int, dim: int, numerics: Numerics):
        self.weight = parameter((vocab_size, dim), ("vocab", "model"), numerics)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return self.weight[...][token_ids]

    def logits(self, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        return project(x, self.weight[...], is_transposed=True, accumulate=jnp.float32)


class GatedMLP(nnx.Module):
    """`(act(x @ gate) * (x @ up)) @ down` (GLU variants, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int, activation: str, numerics: Numerics, *, bias: bool):
        self.activation = activation
        up_axes, down_axes = ("model", "ffn"), ("ffn", "model")
        bias_dims = (1,) if bias else ()
        self.gate = Linear((dim, ffn_dim), up_axes, numerics, bias_dims=bias_dims)
        self.up = Linear((dim, ffn_dim), up_axes, numerics, bias_dims=bias_dims)
        self.down = Linear((ffn_dim, dim), down_axes, numerics, bias_dims=bias_dims)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
