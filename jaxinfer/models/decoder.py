"""The decoder of the Llama-like families: blocks of attention and a gated MLP.

`DecoderConfig` describes how the families differ; a family with another structure has its own file.
Layers are a Python list, unrolled in the jit: compiled for an H100, a `lax.scan` over stacked
weights copies every layer's weights in each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.rotary import Rotary
from jaxinfer.nn.attention import Attention, AttentionConfig, QKNorm
from jaxinfer.nn.checks import (
    epsilon_errors,
    int_fields,
    positive_errors,
    raise_errors,
    rope_dim_errors,
    whole_number_errors,
)
from jaxinfer.nn.experts import Experts, ExpertsConfig
from jaxinfer.nn.latent_attention import LatentAttention, LatentConfig
from jaxinfer.nn.layers import Embedding, GatedMLP, Linear, NoNorm, Numerics, RMSNorm
from jaxinfer.nn.ragged import CacheShape, RaggedBatch
from jaxinfer.nn.rope import Rope
from jaxinfer.nn.tokenwise import HiddenStates, tokenwise


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The options that may differ between layers."""

    rope: Rope | None  # None: the layer has no positional encoding (NoPE)
    ffn_dim: int | None  # None: the layer has experts instead
    window: int | None = None  # tokens that attention sees; None: all
    experts: ExpertsConfig | None = None


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape and variant of a decoder. Every field changes what is computed."""

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int  # positions that the model was trained for
    layers: tuple[LayerConfig, ...]  # layer i is layers[i % len(layers)]
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # norms multiply by offset + weight
    # Norms before attention and MLP, after them (OLMo 2), or both (Gemma 2).
    norms: Literal["before", "after", "around"] = "before"
    qk_norm: Literal["head", "all"] | None = None
    activation: str = "silu"
    is_tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_sinks: bool = False
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the residual stream
    logits_scale: float = 1.0
    # Multi-head latent attention: num_kv_heads is 1, and head_dim the cached numbers of a token.
    latent: LatentConfig | None = None

    def __post_init__(self):
        whole = int_fields(self)
        for i, layer in enumerate(self.layers):
            if layer.experts is None:
                whole[f"layers[{i}].ffn_dim"] = layer.ffn_dim
            if layer.window is not None:
                whole[f"layers[{i}].window"] = layer.window
        wrong = whole_number_errors(whole) + epsilon_errors("norm_eps", self.norm_eps)
        if not wrong:
            wrong += self._head_errors()
        scales = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        wrong += positive_errors(
            {
                name: value
                for name, value in scales.items()
                if name.endswith(("_scale", "_cap")) and value is not None
            }
        )
        if not self.layers:
            wrong.append("layers is empty; it needs at least one")
        raise_errors("the model's configuration", wrong)

    def _head_errors(self) -> list[str]:
        wrong = []
        if self.num_heads % self.num_kv_heads:
            wrong.append(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.latent and (self.num_kv_heads, self.head_dim) != (1, self.latent.key_dim):
            wrong.append(
                f"latent attention has 1 KV head of {self.latent.key_dim}; num_kv_heads is "
                f"{self.num_kv_heads}, head_dim {self.head_dim}"
            )
        dims = {layer.rope.dim for layer in self.layers if layer.rope is not None}
        return wrong + rope_dim_errors(sorted(dims), self.head_dim)

    @property
    def cache(self) -> CacheShape:
        """What the KV cache stores for a token."""
        value_dim = None if self.latent is None else self.latent.kv_rank
        return CacheShape(self.num_layers, self.num_kv_heads, self.head_dim, value_dim)

    @property
    def length_limit(self) -> int | None:
        """The length up to which RoPE does not depend on the prompt's length; None: no limit."""
        ropes = [layer.rope for layer in self.layers if layer.rope is not None]
        limits = [rope.scaling.length_limit for rope in ropes]
        return min((limit for limit in limits if limit is not None), default=None)

    def layer(self, index: int) -> LayerConfig:
        return self.layers[index % len(self.layers)]

    def attention(self, layer: LayerConfig) -> AttentionConfig:
        norm = self.qk_norm
        return AttentionConfig(
            self.model_dim,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=self.attention_scale,
            window=layer.window,
            soft_cap=self.attention_soft_cap,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm=None if norm is None else QKNorm(norm, self.norm_eps, self.norm_offset),
            has_sinks=self.has_sinks,
        )


class Block(nnx.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`, with norms before, after or around them."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, numerics: Numerics):
        scale = config.residual_scale
        self.attention_norm = _norm(config, numerics, config.norms != "after")
        self.attention = _attention(config, layer, numerics)
        self.attention_post_norm = _norm(config, numerics, config.norms != "before", scale)
        self.mlp_norm = _norm(config, numerics, config.norms != "after")
        self.mlp = _mlp(config, layer, numerics)
        self.mlp_post_norm = _norm(config, numerics, config.norms != "before", scale)

    def __call__(
        self,
        hidden: HiddenStates,
        angles: Rotary | None,
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[HiddenStates, KVPages]:
        """Return the hidden states after the block, and the pages with the new keys and values."""
        hidden = hidden.add_norm(self.attention_norm)
        hidden, pages = hidden.attend(self.attention, angles, batch, pages)
        hidden = hidden.apply(self.attention_post_norm).add_norm(self.mlp_norm)
        hidden = hidden.apply(self.mlp).apply(self.mlp_post_norm)
        return hidden, pages


def _norm(
    config: DecoderConfig, numerics: Numerics, is_there: bool, scale: float = 1.0
) -> RMSNorm | NoNorm:
    if not is_there:
        return NoNorm(scale)
    D, eps = config.model_dim, config.norm_eps
    return RMSNorm(D, eps, numerics, offset=config.norm_offset, scale=scale)


def _attention(
    config: DecoderConfig, layer: LayerConfig, numerics: Numerics
) -> Attention | LatentAttention:
    if config.latent is None:
        return Attention(config.attention(layer), numerics)
    D, N, scale = config.model_dim, config.num_heads, config.attention_scale
    return LatentAttention(D, N, config.latent, numerics, scale=scale)


def _mlp(config: DecoderConfig, layer: LayerConfig, numerics: Numerics) -> GatedMLP | Experts:
    D = config.model_dim
    if layer.experts is not None:
        return Experts(D, layer.experts, numerics)
    assert layer.ffn_dim is not None
    return GatedMLP(D, layer.ffn_dim, config.activation, numerics, bias=config.mlp_bias)


# The jit does not make a program: it caches the trace by the block's structure, so that 30 equal
# layers are traced once (0.5 s of Python for a step of SmolLM2, 1.1 s without it). It is inlined by
# JAX rather than by XLA, so that what all layers derive from the batch is computed once (Llama-3-8B
# compiled for a v5p has 21 launches a layer, and 42 otherwise).
@partial(jax.jit, static_argnames=("graph",), inline=True)
def run_block(graph, weights, hidden: HiddenStates, angles, batch, pages):
    """Run a block that `nnx.split` cut into `graph` and `weights`."""
    block: Any = nnx.merge(graph, weights)
    hidden, pages = block(hidden, angles, batch, pages)
    return hidden.computed(), pages


def run_blocks(
    blocks: Sequence[nnx.Module],
    hidden: HiddenStates,
    angles: Sequence[Rotary | None],
    batch: RaggedBatch,
    pages: Sequence[KVPages],
) -> tuple[Float[Array, "T D"], tuple[KVPages, ...]]:
    """Return the hidden states after all blocks, and the pages with the new keys and values.

    Each block has its own angles and pages.
    """
    new_pages = []
    for i, (block, block_angles, layer_pages) in enumerate(zip(blocks, angles, pages, strict=True)):
        with jax.named_scope(f"block_{i}"):
            graph, weights = nnx.split(block)
            hidden, layer_pages = run_block(
                graph, weights, hidden, block_angles, batch, layer_pages
            )
        new_pages.append(layer_pages)
    return hidden.total(), tuple(new_pages)


def head_logits(
    normed: Float[Array, "R D"], head: Linear | None, embed: Embedding
) -> Float[Array, "R V"]:
    """Return float32 logits, by the head or, if it is tied, by the embedding."""
    if head is None:
        return embed.logits(normed)
    return head(normed, accumulate=jnp.float32)


class Decoder(nnx.Module):
    """A decoder over a ragged batch of tokens and the paged cache.

    It has three parts, for the stages of a pipeline: `embedded`, `run`, `logits`.
    """

    def __init__(self, config: DecoderConfig, numerics: Numerics):
        self.config = config
        self.numerics = numerics
        self.embed = Embedding(config.vocab_size, config.model_dim, numerics)
        layers = map(config.layer, range(config.num_layers))
        self.blocks = nnx.List([Block(config, layer, numerics) for layer in layers])
        self.norm = RMSNorm(config.model_dim, config.norm_eps, numerics, offset=config.norm_offset)
        dims, axes = (config.model_dim, config.vocab_size), ("model", "vocab")
        self.head = None if config.is_tied else Linear(dims, axes, numerics)

    def __call__(
        self, token_ids: Int[Array, " T"], batch: RaggedBatch, pages: Sequence[KVPages]
    ) -> tuple[Float[Array, "T D"], tuple[KVPages, ...]]:
        """Return the hidden states of all tokens, and the pages with the new keys and values."""
        return self.run(self.embedded(token_ids, batch), batch, pages)

    def embedded(self, token_ids: Int[Array, " T"], batch: RaggedBatch) -> Float[Array, "T D"]:
        """Return the input of the first block."""
        embedded = self.embed(token_ids)
        if self.config.embedding_scale != 1:  # rounded before the product, as in the reference
            embedded = embedded * jnp.asarray(self.config.embedding_scale, embedded.dtype)
        return embedded

    def run(
        self, hidden: Float[Array, "T D"], batch: RaggedBatch, pages: Sequence[KVPages]
    ) -> tuple[Float[Array, "T D"], tuple[KVPages, ...]]:
        """Return the hidden states after all blocks, and the updated pages."""
        ropes = [self.config.layer(i).rope for i in range(self.config.num_layers)]
        angles = {rope: self._angles(rope, batch) for rope in dict.fromkeys(ropes)}
        entering = HiddenStates(hidden, None, self.numerics)
        return run_blocks(self.blocks, entering, [angles[rope] for rope in ropes], batch, pages)

    def _angles(self, rope: Rope | None, batch: RaggedBatch):
        if rope is None:
            return None
        return tokenwise(self.numerics, rope.angles, batch.positions, batch.rope_len)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return next-token logits, float32, for hidden states that `__call__` returned."""
        return tokenwise(self.numerics, self._logits, hidden)

    def _logits(self, hidden):
        logits = head_logits(self.norm(hidden), self.head, self.embed)
        cap, scale = self.config.logits_soft_cap, self.config.logits_scale
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)
