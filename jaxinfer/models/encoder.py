"""The encoder of the BERT-like families: post-norm blocks of bidirectional attention and an MLP.

A batch is R rows of equal padded length. Row r has `lengths[r]` tokens; the padding after them is
computed, but no token attends to it. There is no cache: all tokens of a text are in one batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.flash_attention import AttentionMask, AttentionVariant, flash_attention
from jaxinfer.nn.checks import raise_errors, transformer_errors
from jaxinfer.nn.layers import MLP, Embedding, LayerNorm, Linear, Numerics, parameter


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The shape and variant of an encoder. All fields but the last two change what is computed."""

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    ffn_dim: int
    num_positions: int  # rows of the position table
    num_token_types: int  # rows of the segment table; 0: no table
    norm_eps: float = 1e-12
    activation: str = "gelu"
    first_position: int = 0  # the first token's row of the position table
    padding_token_id: int | None = None  # takes no position, even within a text (RoBERTa)
    # The tensor names in a Hugging Face file: a prefix of all names, and the suffixes of a norm's.
    prefix: str = ""
    norm_names: tuple[str, str] = ("weight", "bias")

    def __post_init__(self):
        least = {"num_token_types": 0, "first_position": 0}
        errors = transformer_errors(self, least)
        if not errors and self.max_len < 1:
            errors.append(
                f"num_positions is {self.num_positions}; the first token takes position "
                f"{self.first_position}"
            )
        raise_errors("the model's configuration", errors)

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def max_len(self) -> int:
        """The largest number of tokens of a text that have a position."""
        return self.num_positions - self.first_position


class SelfAttention(nnx.Module):
    """Every token of a row attends to all tokens of the row."""

    def __init__(self, config: EncoderConfig, numerics: Numerics):
        D, N, H = config.model_dim, config.num_heads, config.head_dim
        self.scale = H**-0.5
        self.backend = numerics.attention_backend
        axes = ("model", "heads", "head_dim")
        self.q = Linear((D, N, H), axes, numerics, has_bias=True)
        self.k = Linear((D, N, H), axes, numerics, has_bias=True)
        self.v = Linear((D, N, H), axes, numerics, has_bias=True)
        out_axes = ("heads", "head_dim", "model")
        self.o = Linear((N, H, D), out_axes, numerics, num_inputs=2, has_bias=True)

    def __call__(self, x: Float[Array, "T D"], lengths: Int[Array, " R"]) -> Float[Array, "T D"]:
        """Attend within each row; `x` is R rows of T / R tokens."""
        rows = lambda y: y.reshape(lengths.shape[0], -1, *y.shape[1:])
        q, k, v = rows(self.q(x)), rows(self.k(x)), rows(self.v(x))
        variant, mask = AttentionVariant(self.scale), AttentionMask(kv_len=lengths)
        out = flash_attention(q, k, v, variant, mask, backend=self.backend)
        return self.o(out.reshape(x.shape[0], *out.shape[2:]))


class EncoderBlock(nnx.Module):
    """`x = norm(x + attention(x)); x = norm(x + mlp(x))`."""

    def __init__(self, config: EncoderConfig, numerics: Numerics):
        D, eps = config.model_dim, config.norm_eps
        self.attention = SelfAttention(config, numerics)
        self.attention_norm = LayerNorm(D, eps, numerics)
        self.mlp = MLP(D, config.ffn_dim, config.activation, numerics)
        self.mlp_norm = LayerNorm(D, eps, numerics)

    def __call__(self, x: Float[Array, "T D"], lengths: Int[Array, " R"]) -> Float[Array, "T D"]:
        x, _ = self.attention_norm.add_norm(self.attention(x, lengths), x)
        x, _ = self.mlp_norm.add_norm(self.mlp(x), x)
        return x


class Encoder(nnx.Module):
    """An encoder over padded rows of token ids."""

    def __init__(self, config: EncoderConfig, numerics: Numerics):
        self.config = config
        D = config.model_dim
        self.embed = Embedding(config.vocab_size, D, numerics)
        self.positions = parameter((config.num_positions, D), ("position", "model"), numerics)
        dims, axes = (config.num_token_types, D), ("token_type", "model")
        self.token_types = parameter(dims, axes, numerics) if config.num_token_types else None
        self.embed_norm = LayerNorm(D, config.norm_eps, numerics)
        self.blocks = nnx.List([EncoderBlock(config, numerics) for _ in range(config.num_layers)])

    def __call__(
        self, token_ids: Int[Array, "R T"], lengths: Int[Array, " R"]
    ) -> Float[Array, "R T D"]:
        """Return the last block's hidden states; those past a row's length are undefined."""
        R, T = token_ids.shape
        positions = self.positions[...][self._positions(token_ids)].reshape(R * T, -1)
        x = self.embed(token_ids.reshape(-1))
        if self.token_types is not None:  # a row is one text, so all its tokens are segment 0
            x = x + self.token_types[...][0]
        x, _ = self.embed_norm.add_norm(x, positions)
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):
                x = block(x, lengths)
        return x.reshape(R, T, -1)

    def _positions(self, token_ids: Int[Array, "R T"]) -> Int[Array, "R T"]:
        """Return the rows of the position table.

        Padding tokens take the row before the first token's; the tokens after them move up.
        """
        first, padding = self.config.first_position, self.config.padding_token_id
        if padding is None:
            return jnp.broadcast_to(first + jnp.arange(token_ids.shape[1]), token_ids.shape)
        has_position = token_ids != padding
        return jnp.where(has_position, jnp.cumsum(has_position, axis=1), 0) + first - 1
