"""Self-attention of a layer over the paged cache."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.kernels.paged_attention import paged_attention
from jaxinfer.kv_cache import LayerPages, RaggedBatch
from jaxinfer.nn.layers import Linear, Numerics
from jaxinfer.nn.rope import rotate


class Attention(nnx.Module):
    """Multi-head, grouped-query or multi-query attention with rotary positions.

    Writes the new tokens' keys and values to their pages, then attends over the row's pages.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        numerics: Numerics,
        *,
        qkv_bias: bool,
        out_bias: bool,
    ):
        self.numerics = numerics
        self.scale = head_dim**-0.5
        D, N, K, H = dim, num_heads, num_kv_heads, head_dim
        bias = (1, 2) if qkv_bias else ()
        q_axes, kv_axes = ("model", "heads", "head_dim"), ("model", "kv_heads", "head_dim")
        self.q = Linear((D, N, H), q_axes, numerics, bias_dims=bias)
        self.k = Linear((D, K, H), kv_axes, numerics, bias_dims=bias)
        self.v = Linear((D, K, H), kv_axes, numerics, bias_dims=bias)
        out_axes = ("heads", "head_dim", "model")
        out_bias_dims = (2,) if out_bias else ()
        self.o = Linear((N, H, D), out_axes, numerics, bias_dims=out_bias_dims)

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: tuple[jax.Array, jax.Array],
        batch: RaggedBatch,
        pages: LayerPages,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        q, k, v = rotate(self.q(x), *angles), rotate(self.k(x), *angles), self.v(x)
        pages = pages.write(k, v, batch)
        out = paged_attention(
            q,
            pages.k,
            pages.v,
            batch.q_start,
            batch.kv_len,
            batch.page_table,
            scale=self.scale,
            batch_invariant=self.numerics.batch_invariant,
            backend=self.numerics.attention_backend,
        )
        return self.o(out), pages
