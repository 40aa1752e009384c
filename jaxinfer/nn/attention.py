"""Self-attention of a layer over the paged cache."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.rotary import Rotary
from jaxinfer.nn.cached_attention import attend_to_cache
from jaxinfer.nn.layers import Linear, Numerics, RMSNorm, parameter
from jaxinfer.nn.ragged import RaggedBatch
from jaxinfer.sharding.collectives import local_shard


@dataclasses.dataclass(frozen=True)
class QKNorm:
    """An RMSNorm of queries and keys before RoPE, over each head by itself (Qwen 3) or over all
    heads as one vector (OLMo 2)."""

    over: Literal["head", "all"]
    eps: float
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The shape and variant of a layer's attention: multi-head, grouped-query or multi-query.

    `kernels/paged_attention/api.py` defines the options of the scores.
    """

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None  # None: head_dim ** -0.5
    window: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    has_sinks: bool = False
    has_alibi: bool = False


class Attention(nnx.Module):
    """Attention over the paged cache, in three parts.

    `project_in` and `project_out` treat each token by itself; `attend` reads and writes the cache.
    """

    def __init__(self, config: AttentionConfig, numerics: Numerics):
        self.config = config
        self.numerics = numerics
        D, N, K, H = config.dim, config.num_heads, config.num_kv_heads, config.head_dim
        q_axes, kv_axes = ("model", "heads", "head_dim"), ("model", "kv_heads", "head_dim")
        self.q = Linear((D, N, H), q_axes, numerics, has_bias=config.qkv_bias)
        self.k = Linear((D, K, H), kv_axes, numerics, has_bias=config.qkv_bias)
        self.v = Linear((D, K, H), kv_axes, numerics, has_bias=config.qkv_bias)
        out_axes = ("heads", "head_dim", "model")
        self.o = Linear((N, H, D), out_axes, numerics, num_inputs=2, has_bias=config.out_bias)
        self.q_norm = self._qk_norm(N, "heads")
        self.k_norm = self._qk_norm(K, "kv_heads")
        self.sinks = parameter((N,), ("heads",), numerics) if config.has_sinks else None

    def project_in(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Return queries, keys and values before RoPE."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        return _apply_norm(q, self.q_norm), _apply_norm(k, self.k_norm), v

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        angles: Rotary | None,
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[Float[Array, "T N H"], KVPages]:
        """Apply RoPE (unless `angles` is None), store keys and values in their pages, and attend
        over each row's pages."""
        config = self.config
        variant = AttentionVariant(
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            window=config.window,
            soft_cap=config.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...].astype(jnp.float32),
            alibi_slopes=self._slopes() if config.has_alibi else None,
        )
        return attend_to_cache(q, k, v, batch, pages, variant, self.numerics, rotary=angles)

    def project_out(self, out: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        return self.o(out)

    def _slopes(self) -> jax.Array:
        """Return the ALiBi slopes of this device's heads."""
        layout, slopes = self.numerics.layout, jnp.asarray(alibi_slopes(self.config.num_heads))
        return local_shard(slopes, layout.axes("heads"), layout.parts("heads"), dim=0)

    def _qk_norm(self, heads: int, axis: str) -> RMSNorm | None:
        norm, H = self.config.qk_norm, self.config.head_dim
        if norm is None:
            return None
        dim, axis = (H, "head_dim") if norm.over == "head" else (heads * H, axis)
        return RMSNorm(dim, norm.eps, self.numerics, offset=norm.offset, axis=axis)


def _apply_norm(x: Float[Array, "T N H"], norm: RMSNorm | None) -> jax.Array:
    if norm is None:
        return x
    return norm(x.reshape(-1, norm.weight[...].shape[0])).reshape(x.shape)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return ALiBi's slope for each head, float32 [N] (arXiv:2108.12409).

    The slopes are 2^(-8/n), 2^(-16/n), ... for the largest power of two n up to N; the heads beyond
    n take every other slope of 2n heads.
    """
    n = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 / n * np.arange(1, n + 1))
    between = 2.0 ** (-4.0 / n * np.arange(1, 2 * (num_heads - n) + 1, 2))
    return np.concatenate([slopes, between]).astype(np.float32)
