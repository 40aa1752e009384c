"""Self-attention of a layer over the paged cache."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.update import Rotary, update_and_attend
from jaxinfer.kv_cache import RaggedBatch
from jaxinfer.nn.layers import Linear, Numerics


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
        q_axes, kv_axes = ("model", "heads", "head_dim"), ("model", "kv_heads", "head_dim")
        self.q = Linear((D, N, H), q_axes, numerics, has_bias=qkv_bias)
        self.k = Linear((D, K, H), kv_axes, numerics, has_bias=qkv_bias)
        self.v = Linear((D, K, H), kv_axes, numerics, has_bias=qkv_bias)
        out_axes = ("heads", "head_dim", "model")
        self.o = Linear((N, H, D), out_axes, numerics, num_inputs=2, has_bias=out_bias)

    def project_in(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values, not yet turned to their positions."""
        return self.q(x), self.k(x), self.v(x)

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        angles: Rotary,
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[Float[Array, "T N H"], KVPages]:
        """Turn to positions, store keys and values in their pages, attend over each row's pages."""
        return update_and_attend(
            q,
            k,
            v,
            pages,
            batch.q_start,
            batch.kv_len,
            batch.page_table,
            batch.write_page,
            batch.write_cell,
            rotary=angles,
            scale=self.scale,
            batch_invariant=self.numerics.batch_invariant,
            backend=self.numerics.attention_backend,
        )

    def project_out(self, out: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        return self.o(out)
