"""Self-attention of a layer over the paged cache."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.kernels.paged_attention import paged_attention
from jaxinfer.kv_cache import LayerPages, RaggedBatch
from jaxinfer.nn.layers import Linear, Numerics
from jaxinfer.nn.rope import rotate


class Attention(nnx.Module):
    """Multi-head, grouped-query or multi-query attention with rotary positions, in three parts:
    what each token does alone, what it does with its row's cache, and alone again."""

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

    def project_in(
        self, x: Float[Array, "T D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values; the first two turned to their positions."""
        return rotate(self.q(x), cos, sin), rotate(self.k(x), cos, sin), self.v(x)

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        batch: RaggedBatch,
        pages: LayerPages,
    ) -> tuple[Float[Array, "T N H"], LayerPages]:
        """Store keys and values in their pages, then attend over each row's pages."""
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
        return out, pages

    def project_out(self, out: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        return self.o(out)
