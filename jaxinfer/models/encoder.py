"""The encoder of the BERT-like families: post-norm blocks of attention to both sides and an MLP.

A batch is R rows of equal padded length; row r holds `lengths[r]` tokens, and what lies behind them
is computed and seen by nobody. There is no cache: every token of a text is there at once.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.flash_attention import AttentionMask, AttentionVariant, flash_attention
from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.nn.checks import epsilon_errors, int_fields, raise_errors, whole_number_errors
from jaxinfer.nn.layers import MLP, Embedding, LayerNorm, Linear, Numerics, parameter


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Shape and variant of an encoder. All fields but the last two change what is computed."""

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    ffn_dim: int
    num_positions: int  # rows of the position table
    num_token_types: int  # rows of the segment table; 0: there is none
    norm_eps: float = 1e-12
    activation: str = "gelu"
    first_position: int = 0  # of the table: the first token's
    padding_token_id: int | None = None  # takes no position: RoBERTa's padding, were it in a text
    # How a Hugging Face file spells its tensors: what stands before all names, and after a norm's.
    prefix: str = ""
    norm_names: tuple[str, str] = ("weight", "bias")

    def __post_init__(self):
        least = {"num_token_types": 0, "first_position": 0}
        wrong = whole_number_errors(int_fields(self), least)
        if not wrong and self.model_dim % self.num_heads:
            wrong.append(f"model_dim {self.model_dim} is no multiple of {self.num_heads} heads")
        if not wrong and self.max_len < 1:
            wrong.append(
                f"num_positions is {self.num_positions}; the first token takes position "
                f"{self.first_position}"
            )
        wrong += epsilon_errors("norm_eps", self.norm_eps)
        if self.activation not in ACTIVATIONS:
            wrong.append(f"activation is {self.activation!r}; there are {', '.join(ACTIVATIONS)}")
        raise_errors("the model's configuration", wrong)

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def max_len(self) -> int:
        """Tokens of a text that have a position."""
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
        """`x` is R rows of T / R tokens."""
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
    """Token ids of padded rows in, a hidden state of every token out."""

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
        """Hidden states after the last block; those at and past a row's length mean nothing."""
        R, T = token_ids.shape
        places = self.positions[...][self._positions(token_ids)].reshape(R * T, -1)
        x = self.embed(token_ids.reshape(-1))
        if self.token_types is not None:  # one text, hence segment 0
            x = x + self.token_types[...][0]
        x, _ = self.embed_norm.add_norm(x, places)
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):
                x = block(x, lengths)
        return x.reshape(R, T, -1)

    def _positions(self, token_ids: Int[Array, "R T"]) -> Int[Array, "R T"]:
        """Rows of the position table. Where a token takes none, those after it move up, and it has
        the row before the first token's."""
        first, unplaced = self.config.first_position, self.config.padding_token_id
        if unplaced is None:
            return jnp.broadcast_to(first + jnp.arange(token_ids.shape[1]), token_ids.shape)
        is_placed = token_ids != unplaced
        return jnp.where(is_placed, jnp.cumsum(is_placed, axis=1), 0) + first - 1
