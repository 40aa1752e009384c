"""Multi-head latent attention of DeepSeek-V2 (arXiv:2405.04434, section 2.1) over the paged cache.

A token's keys and values of all heads are products of one latent c [r] (`kv_lora_rank`), and one
key of `rope_dim` numbers, turned to its position, serves every head beside. The cache holds c and
that key: r + rope_dim numbers a token, whatever the number of heads (DeepSeek-V3: 576; its keys and
values would be 40,960).

The absorbed form: the products that would make keys and values of c go to the other side instead,

    q_nope[n] . (K_n c)        =  (q_nope[n] K_n) . c             K_n [nope_dim, r]
    sum_s weight[s] (V_n c_s)  =  V_n (sum_s weight[s] c_s)       V_n [value_dim, r]

so that attention is multi-query: N heads of r + rope_dim numbers, over one key a token, whose first
r numbers are the value. Decodes and prefill chunks are rows of one step, and take one form: keys
and values made of c would be made anew for every cached token in each step, which a chunk pays back
only if it is long beside what is cached before it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.rotary import Rotary, rotate
from jaxinfer.nn.cached_attention import attend_to_cache
from jaxinfer.nn.checks import not_whole, refuse_wrong
from jaxinfer.nn.layers import Linear, Numerics, RMSNorm, parameter
from jaxinfer.nn.ragged import RaggedBatch


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Shape and variant of latent attention. A head's query has `nope_dim` numbers that know no
    position and `rope_dim` that do."""

    kv_rank: int  # r
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None  # queries are made of a latent too; None: of the hidden state
    norm_eps: float = 1e-6  # of the latents' norms
    has_bias: bool = False  # of the products that make the latents, and of the last
    # How files keep the weights (`models/deepseek_weights.py`): RoPE's dimensions in pairs or in
    # halves, and the two products that are absorbed in one tensor or in two.
    is_interleaved: bool = True
    is_kv_split: bool = False

    def __post_init__(self):
        dims = {n: v for n, v in dataclasses.asdict(self).items() if n.endswith(("_rank", "_dim"))}
        if self.q_rank is None:
            del dims["q_rank"]
        refuse_wrong("the latent attention", not_whole(dims))

    @property
    def key_dim(self) -> int:
        """What is cached of a token."""
        return self.kv_rank + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Of a query, before its first part becomes a latent."""
        return self.nope_dim + self.rope_dim


class LatentAttention(nnx.Module):
    """In three parts, as `nn.attention.Attention`: each token alone, with its row's cache, alone.

    `scale` None: `(nope_dim + rope_dim) ** -0.5`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        config: LatentConfig,
        numerics: Numerics,
        *,
        scale: float | None = None,
    ):
        self.config = config
        self.numerics = numerics
        self.scale = config.head_dim**-0.5 if scale is None else scale
        D, N, r, bias = dim, num_heads, config.kv_rank, config.has_bias
        norm = lambda rank, axis: RMSNorm(rank, config.norm_eps, numerics, axis=axis)
        if config.q_rank is None:
            inputs, axis = D, "model"
            self.q_a = self.q_a_norm = None
        else:
            inputs, axis = config.q_rank, "q_latent"
            self.q_a = Linear((D, inputs), ("model", axis), numerics, has_bias=bias)
            self.q_a_norm = norm(inputs, axis)
        self.q = Linear((inputs, N, config.head_dim), (axis, "heads", "head_dim"), numerics)
        self.kv_a = Linear((D, config.key_dim), ("model", "latent"), numerics, has_bias=bias)
        self.kv_a_norm = norm(r, "latent")
        self.k_b = parameter((N, config.nope_dim, r), ("heads", "head_dim", "latent"), numerics)
        self.v_b = parameter((N, r, config.value_dim), ("heads", "latent", "head_dim"), numerics)
        out_axes = ("heads", "head_dim", "model")
        dims = (N, config.value_dim, D)
        self.o = Linear(dims, out_axes, numerics, num_inputs=2, has_bias=bias)

    def project_in(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T N key"], Float[Array, "T one key"]]:
        """Queries in the latents' space and the keys, not yet turned to their positions."""
        r, nope = self.config.kv_rank, self.config.nope_dim
        x_of_q = x
        if self.q_a is not None and self.q_a_norm is not None:
            x_of_q = self.q_a_norm(self.q_a(x))
        q = self.q(x_of_q)
        absorbed = jnp.einsum("tnh,nhr->tnr", q[..., :nope], self.k_b[...])
        q = jnp.concatenate([absorbed.astype(x.dtype), q[..., nope:]], axis=-1)
        kv = self.kv_a(x)
        k = jnp.concatenate([self.kv_a_norm(kv[:, :r]), kv[:, r:]], axis=-1)
        return q, k[:, None]

    def attend(
        self,
        q: Float[Array, "T N key"],
        k: Float[Array, "T one key"],
        angles: Rotary | None,
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[Float[Array, "T N r"], KVPages]:
        """Turn to positions, store the keys in their pages, attend over each row's pages."""
        r = self.config.kv_rank
        assert angles is not None, "a layer of latent attention has RoPE"

        def turned(x: jax.Array) -> jax.Array:
            return jnp.concatenate([x[..., :r], rotate(x[..., r:], *angles)], axis=-1)

        variant = AttentionVariant(self.scale, value_dim=r)
        return attend_to_cache(turned(q), turned(k), None, batch, pages, variant, self.numerics)

    def project_out(self, out: Float[Array, "T N r"]) -> Float[Array, "T D"]:
        values = jnp.einsum("tnr,nrh->tnh", out, self.v_b[...])
        return self.o(values.astype(out.dtype))
