"""The decoder of the GPT-like families: blocks of attention and a plain MLP, between LayerNorms.

Told apart by `GptConfig`: GPT-2 and OPT have a table of learned positions, GPT-NeoX turns queries
and keys (RoPE), BLOOM biases scores by distance (ALiBi). Layers are a Python list, unrolled in the
jit, as those of `decoder.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.update import Rotary
from jaxinfer.models.decoder import head_logits, run_blocks
from jaxinfer.nn.attention import Attention, AttentionConfig
from jaxinfer.nn.checks import (
    epsilon_errors,
    int_fields,
    raise_errors,
    rope_dim_errors,
    whole_number_errors,
)
from jaxinfer.nn.layers import MLP, Embedding, LayerNorm, Linear, NoNorm, Numerics, parameter
from jaxinfer.nn.ragged import CacheShape, RaggedBatch
from jaxinfer.nn.rope import Rope
from jaxinfer.nn.tokenwise import HiddenStates, tokenwise


@dataclasses.dataclass(frozen=True)
class GptConfig:
    """Shape and variant of such a decoder. Every field changes what is computed."""

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    ffn_dim: int
    max_len: int  # positions the model was made for; with a table, all there are
    activation: str = "gelu_pytorch_tanh"
    norm_eps: float = 1e-5
    # What attention and MLP are added to: each to what it was the norm of; both to what the block
    # took in (GPT-J, GPT-NeoX); each to the norm itself (BLOOM's option).
    residual: Literal["sequential", "parallel", "normed"] = "sequential"
    rope: Rope | None = None
    has_position_table: bool = False
    first_position: int = 0  # of the table: the first token's
    has_alibi: bool = False
    has_embedding_norm: bool = False
    has_attention_bias: bool = True
    is_tied: bool = True  # the head is the embedding
    scales_scores: bool = True  # by head_dim ** -0.5
    scales_by_layer: bool = False  # scores of layer i by 1 / (i + 1) as well

    def __post_init__(self):
        wrong = whole_number_errors(int_fields(self), {"first_position": 0})
        if not wrong and self.model_dim % self.num_heads:
            wrong.append(f"model_dim {self.model_dim} is no multiple of {self.num_heads} heads")
        if not wrong and self.rope is not None:
            wrong += rope_dim_errors([self.rope.dim], self.head_dim)
        wrong += epsilon_errors("norm_eps", self.norm_eps)
        if self.activation not in ACTIVATIONS:
            wrong.append(f"activation is {self.activation!r}; there are {', '.join(ACTIVATIONS)}")
        raise_errors("the model's configuration", wrong)

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def cache(self) -> CacheShape:
        """What the KV cache stores of a token."""
        return CacheShape(self.num_layers, self.num_heads, self.head_dim)

    @property
    def length_limit(self) -> int | None:
        """Up to so many tokens, what a token computes does not depend on the prompt's length."""
        return None if self.rope is None else self.rope.scaling.length_limit

    def attention(self, index: int) -> AttentionConfig:
        """Of layer `index`."""
        scale = self.head_dim**-0.5 if self.scales_scores else 1.0
        return AttentionConfig(
            self.model_dim,
            self.num_heads,
            self.num_heads,
            self.head_dim,
            scale=scale / (index + 1) if self.scales_by_layer else scale,
            qkv_bias=self.has_attention_bias,
            out_bias=self.has_attention_bias,
            has_alibi=self.has_alibi,
        )


class GptBlock(nnx.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`, or one of `GptConfig.residual`'s variants."""

    def __init__(self, config: GptConfig, index: int, numerics: Numerics):
        self.residual = config.residual
        # Part of the first block, so that it shares a loop of `tokenwise` with products. On its
        # own, XLA joins a loop of one tile with the next: other bits than from two tiles.
        is_normed = config.has_embedding_norm and index == 0
        norm = LayerNorm(config.model_dim, config.norm_eps, numerics) if is_normed else NoNorm()
        self.embedding_norm = norm
        self.attention_norm = LayerNorm(config.model_dim, config.norm_eps, numerics)
        self.attention = Attention(config.attention(index), numerics)
        self.mlp_norm = LayerNorm(config.model_dim, config.norm_eps, numerics)
        self.mlp = MLP(config.model_dim, config.ffn_dim, config.activation, numerics)

    def __call__(
        self,
        hidden: HiddenStates,
        angles: Rotary | None,
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[HiddenStates, KVPages]:
        """Return the hidden states after the block, and the pages with the new keys and values."""
        hidden = self._add_norm(hidden.apply(self.embedding_norm), self.attention_norm)
        hidden, pages = hidden.attend(self.attention, angles, batch, pages)
        if self.residual == "parallel":
            return hidden.then(self._add_parallel_mlp), pages
        hidden = self._add_norm(hidden, self.mlp_norm)
        return hidden.apply(self.mlp), pages

    def _add_norm(self, hidden: HiddenStates, norm: LayerNorm) -> HiddenStates:
        hidden = hidden.add_norm(norm)
        return hidden.then(lambda x, _: (x, x)) if self.residual == "normed" else hidden

    def _add_parallel_mlp(self, x, residual):
        return x + self.mlp(self.mlp_norm(residual)), residual


class GptDecoder(nnx.Module):
    """Tokens of a ragged batch in, hidden states and the updated pages out; in parts as `Decoder`
    is."""

    def __init__(self, config: GptConfig, numerics: Numerics):
        self.config = config
        self.numerics = numerics
        D = config.model_dim
        self.embed = Embedding(config.vocab_size, D, numerics)
        table, axes = (config.first_position + config.max_len, D), ("position", "model")
        has_table = config.has_position_table
        self.positions = parameter(table, axes, numerics) if has_table else None
        layers = range(config.num_layers)
        self.blocks = nnx.List([GptBlock(config, index, numerics) for index in layers])
        self.norm = LayerNorm(D, config.norm_eps, numerics)
        dims, axes = (D, config.vocab_size), ("model", "vocab")
        self.head = None if config.is_tied else Linear(dims, axes, numerics)

    def __call__(
        self, token_ids: Int[Array, " T"], batch: RaggedBatch, pages: Sequence[KVPages]
    ) -> tuple[Float[Array, "T D"], tuple[KVPages, ...]]:
        """Hidden states of every token; pages with the new keys and values."""
        return self.run(self.embedded(token_ids, batch), batch, pages)

    def embedded(self, token_ids: Int[Array, " T"], batch: RaggedBatch) -> Float[Array, "T D"]:
        """What the first block takes."""
        x = self.embed(token_ids)
        if self.positions is not None:  # `Engine` lets no position past the table's end come here
            x = x + self.positions[...][batch.positions + self.config.first_position]
        return x

    def run(
        self, hidden: Float[Array, "T D"], batch: RaggedBatch, pages: Sequence[KVPages]
    ) -> tuple[Float[Array, "T D"], tuple[KVPages, ...]]:
        """Hidden states after all blocks of those before them."""
        rope, angles = self.config.rope, None
        if rope is not None:
            angles = tokenwise(self.numerics, rope.angles, batch.positions, batch.rope_len)
        entering = HiddenStates(hidden, None, self.numerics)
        return run_blocks(self.blocks, entering, [angles] * len(self.blocks), batch, pages)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Next-token logits, float32, of hidden states that `__call__` returned."""
        return tokenwise(self.numerics, self._logits, hidden)

    def _logits(self, hidden):
        return head_logits(self.norm(hidden), self.head, self.embed)
