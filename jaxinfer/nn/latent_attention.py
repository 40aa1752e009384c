"""Multi-head latent attention of DeepSeek-V2 (arXiv:2405.04434, section 2.1) over the paged cache.

The keys and values of all heads are products of one latent c [r] (`kv_lora_rank`) per token. All
heads also share one key of `rope_dim` numbers, to which RoPE is applied. The cache stores c and
that key: r + rope_dim numbers a token, whatever the number of heads (576 in DeepSeek-V3, whose keys
and values would be 40,960 numbers).

The absorbed form applies the products that would make keys and values of c to the queries and to
the output instead:

    q_nope[n] . (K_n c)        =  (q_nope[n] K_n) . c             K_n [nope_dim, r]
    sum_s weight[s] (V_n c_s)  =  V_n (sum_s weight[s] c_s)       V_n [value_dim, r]

Attention is then multi-query: N heads of r + rope_dim numbers over one key a token, whose first r
numbers are the value. Decodes and prefill chunks are rows of the same step and use the same form.
Expanding c into keys and values would recompute them for every cached token in each step, which
pays off only for a chunk that is long compared with what is cached before it.
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
from jaxinfer.nn.checks import raise_errors, whole_number_errors
from jaxinfer.nn.layers import Linear, Numerics, RMSNorm, parameter
from jaxinfer.nn.ragged import RaggedBatch


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """The shape and variant of latent attention.

    A head's query has `nope_dim` numbers without position and `rope_dim` numbers with RoPE.
    """

    kv_rank: int  # r
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None  # the queries' latent; None: queries are made of the hidden state
    norm_eps: float = 1e-6  # of the latents' norms
    has_bias: bool = False  # in the products that make the latents, and in the output projection
    # How files store the weights (`models/deepseek_weights.py`): RoPE's dimensions as pairs or as
    # halves, and the two absorbed matrices as one tensor or as two.
    is_interleaved: bool = True
    is_kv_split: bool = False

    def __post_init__(self):
        dims = {n: v for n, v in dataclasses.asdict(self).items() if n.endswith(("_rank", "_dim"))}
        if self.q_rank is None:
            del dims["q_rank"]
        raise_errors("the latent attention", whole_number_errors(dims))

    @property
    def key_dim(self) -> int:
        """Numbers that the cache stores for a token."""
        return self.kv_rank + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Numbers in a head's query before absorption."""
        return self.nope_dim + self.rope_dim


class LatentAttention(nnx.Module):
    """Latent attention in the three parts of `nn.attention.Attention`.

    `scale` defaults to `(nope_dim + rope_dim) ** -0.5`.
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
        """Return absorbed queries, and keys, before RoPE."""
        r, nope = self.config.kv_rank, self.config.nope_dim
        q_input = x
        if self.q_a is not None and self.q_a_norm is not None:
            q_input = self.q_a_norm(self.q_a(x))
        q = self.q(q_input)
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
        """Apply RoPE, store the keys in their pages, and attend over each row's pages."""
        r = self.config.kv_rank
        assert angles is not None, "a layer of latent attention has RoPE"

        def rotated(x: jax.Array) -> jax.Array:
            return jnp.concatenate([x[..., :r], rotate(x[..., r:], *angles)], axis=-1)

        variant = AttentionVariant(self.scale, value_dim=r)
        return attend_to_cache(rotated(q), rotated(k), None, batch, pages, variant, self.numerics)

    def project_out(self, out: Float[Array, "T N r"]) -> Float[Array, "T D"]:
        values = jnp.einsum("tnr,nrh->tnh", out, self.v_b[...])
        return self.o(values.astype(out.dtype))
