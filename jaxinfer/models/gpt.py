"""The decoder of the GPT-like families: blocks of attention and a plain MLP, between LayerNorms.

`GptConfig` describes how the families differ: GPT-2 and OPT have a table of learned positions,
GPT-NeoX uses RoPE, BLOOM uses ALiBi. Layers are a Python list, unrolled in the jit, as in
`decoder.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.update import Rotary
from jaxinfer.models.decoder import head_logits, run_blocks
from jaxinfer.nn.attention import Attention, AttentionConfig
from jaxinfer.nn.checks import (
    raise_errors,
    rope_dim_errors,
    transformer_errors,
)
from jaxinfer.nn.layers import MLP, Embedding, LayerNorm, Linear, NoNorm, Numerics, parameter
from jaxinfer.nn.ragged import CacheShape, RaggedBatch
from jaxinfer.nn.rope import Rope
from jaxinfer.nn.tokenwise import HiddenStates, tokenwise


@dataclasses.dataclass(frozen=True)
class GptConfig:
    """The shape and variant of a GPT-like decoder. Every field changes what is computed."""

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    ffn_dim: int
    max_len: int  # positions that the model was trained for; the limit if it has a table
    activation: str = "gelu_pytorch_tanh"
    norm_eps: float = 1e-5
    # What attention and MLP are added to. "sequential": each to the input of its norm. "parallel":
    # both to the block's input (GPT-J, GPT-NeoX). "normed": each to its norm (an option of BLOOM).
    residual: Literal["sequential", "parallel", "normed"] = "sequential"
    rope: Rope | None = None
    has_position_table: bool = False
    first_position: int = 0  # the first token's row of the position table
    has_alibi: bool = False
    has_embedding_norm: bool = False
    has_attention_bias: bool = True
    is_tied: bool = True  # the head is the embedding
    scales_scores: bool = True  # scale scores by head_dim ** -0.5
    scales_by_layer: bool = False  # also scale the scores of layer i by 1 / (i + 1)

    def __post_init__(self):
        errors = transformer_errors(self, {"first_position": 0})
        if not errors and self.rope is not None:
            errors += rope_dim_errors([self.rope.dim], self.head_dim)
        raise_errors("the model's configuration", errors)

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def cache(self) -> CacheShape:
        """What the KV cache stores for a token."""
        return CacheShape(self.num_layers, self.num_heads, self.head_dim)

    @property
    def length_limit(self) -> int | None:
        """The length up to which RoPE does not depend on the prompt's length; None: no limit."""
        return None if self.rope is None else self.rope.scaling.length_limit

    def attention(self, index: int) -> AttentionConfig:
        """Return the attention configuration of layer `index`."""
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
        # It is part of the first block, so that it shares a loop over tiles with products: XLA
        # fuses a separate loop of one tile with the next loop, which changes its bits.
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
    """A GPT-like decoder over a ragged batch, in the same parts as `Decoder`."""

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
        """Return the hidden states of all tokens, and the pages with the new keys and values."""
        return self.run(self.embedded(token_ids, batch), batch, pages)

    def embedded(self, token_ids: Int[Array, " T"], batch: RaggedBatch) -> Float[Array, "T D"]:
        """Return the input of the first block."""
        x = self.embed(token_ids)
        if self.positions is not None:  # the engine limits positions to the table
            x = x + self.positions[...][batch.positions + self.config.first_position]
        return x

    def run(
        self, hidden: Float[Array, "T D"], batch: RaggedBatch, pages: Sequence[KVPages]
    ) -> tuple[Float[Array, "T D"], tuple[KVPages, ...]]:
        """Return the hidden states after all blocks, and the updated pages."""
        rope, angles = self.config.rope, None
        if rope is not None:
            angles = tokenwise(self.numerics, rope.angles, batch.positions, batch.rope_len)
        entering = HiddenStates(hidden, None, self.numerics)
        return run_blocks(self.blocks, entering, [angles] * len(self.blocks), batch, pages)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return next-token logits, float32, for hidden states that `__call__` returned."""
        return tokenwise(self.numerics, self._logits, hidden)

    def _logits(self, hidden):
        return head_logits(self.norm(hidden), self.head, self.embed)
