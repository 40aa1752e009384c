"""The decoder of the Llama-like families: pre-norm blocks of attention and a gated MLP.

One file for all of them, told apart by `DecoderConfig`; a family that differs in structure gets a
file of its own. Layers are a Python list, unrolled in the jit (compiled for an H100, a `lax.scan`
over stacked weights copies every layer's weights each step).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kv_cache import RaggedBatch
from jaxinfer.nn.attention import Attention
from jaxinfer.nn.layers import Embedding, GatedMLP, Linear, Numerics, RMSNorm, tokenwise
from jaxinfer.nn.rope import Rope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and variant of a decoder. Every field changes what is computed."""

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_len: int  # positions the model was made for
    rope: Rope
    norm_eps: float = 1e-6
    activation: str = "silu"
    is_tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        wrong = [
            f"{field.name} is {value!r}; it must be a whole number of at least 1"
            for field in dataclasses.fields(self)
            if field.type == "int"
            and (type(value := getattr(self, field.name)) is not int or value < 1)
        ]
        if not wrong and self.num_heads % self.num_kv_heads:
            wrong.append(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not wrong and (self.rope.dim % 2 or not 2 <= self.rope.dim <= self.head_dim):
            wrong.append(
                f"rope.dim is {self.rope.dim}; it must be even, from 2 to head_dim {self.head_dim}"
            )
        if not 0 < self.norm_eps < 1:
            wrong.append(f"norm_eps is {self.norm_eps}; it must lie between 0 and 1")
        if wrong:
            raise ValueError(
                "the model's configuration does not hold together: " + "; ".join(wrong)
            )


class Block(nnx.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`."""

    def __init__(self, config: DecoderConfig, numerics: Numerics):
        self.numerics = numerics
        D, eps = config.model_dim, config.norm_eps
        self.attention_norm = RMSNorm(D, eps, numerics)
        self.attention = Attention(
            D,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            numerics,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )
        self.mlp_norm = RMSNorm(D, eps, numerics)
        self.mlp = GatedMLP(D, config.ffn_dim, config.activation, numerics, bias=config.mlp_bias)

    def __call__(
        self,
        update: Float[Array, "T D"],
        residual: Float[Array, "T D"] | None,
        angles: tuple[Float[Array, "T half"], Float[Array, "T half"]],
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], KVPages]:
        """`update`, what the block before computed, is added to the residual stream here, in one
        pass with the norm; so is this block's own in the next one."""
        streams = (update,) if residual is None else (update, residual)
        q, k, v, total = tokenwise(self.numerics, self._before, *streams)
        attended, pages = self.attention.attend(q, k, v, angles, batch, pages)
        update, total = tokenwise(self.numerics, self._after, attended, total)
        return update, total, pages

    def _before(self, update, residual=None):
        normed, residual = self.attention_norm.after(update, residual)
        return *self.attention.project_in(normed), residual

    def _after(self, attended, residual):
        update = self.attention.project_out(attended)
        normed, residual = self.mlp_norm.after(update, residual)
        return self.mlp(normed), residual


# Not a program of its own: jit remembers the trace by the block's structure, so 30 equal layers are
# traced once (a step of SmolLM2: 1.1 s of Python without, 0.5 with). Inlined here and not by XLA,
# so that what all layers derive from the batch is computed once (Llama-3-8B compiled for a v5p: 42
# launches a layer otherwise, 21 so).
@partial(jax.jit, static_argnames=("graph",), inline=True)
def _run_block(graph, weights, update, residual, angles, batch, pages):
    return nnx.merge(graph, weights)(update, residual, angles, batch, pages)


class Decoder(nnx.Module):
    """Tokens of a ragged batch in, hidden states and the updated pages out."""

    def __init__(self, config: DecoderConfig, numerics: Numerics):
        self.config = config
        self.numerics = numerics
        self.embed = Embedding(config.vocab_size, config.model_dim, numerics)
        self.blocks = nnx.List([Block(config, numerics) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.model_dim, config.norm_eps, numerics)
        dims, axes = (config.model_dim, config.vocab_size), ("model", "vocab")
        self.head = None if config.is_tied else Linear(dims, axes, numerics)

    def __call__(
        self, token_ids: Int[Array, " T"], batch: RaggedBatch, pages: Sequence[KVPages]
    ) -> tuple[Float[Array, "T D"], tuple[KVPages, ...]]:
        """Hidden states of every token; pages with the new keys and values."""
        update, residual = self.embed(token_ids), None
        angles = tokenwise(self.numerics, self.config.rope.angles, batch.positions, batch.rope_len)
        new_pages = []
        for i, (block, layer_pages) in enumerate(zip(self.blocks, pages, strict=True)):
            with jax.named_scope(f"block_{i}"):
                graph, weights = nnx.split(block)
                update, residual, layer_pages = _run_block(
                    graph, weights, update, residual, angles, batch, layer_pages
                )
            new_pages.append(layer_pages)
        return (update if residual is None else residual + update), tuple(new_pages)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Next-token logits, float32, of hidden states that `__call__` returned."""
        return tokenwise(self.numerics, self._logits, hidden)

    def _logits(self, hidden):
        normed = self.norm(hidden)
        if self.head is None:
            return self.embed.logits(normed)
        return self.head(normed, accumulate=jnp.float32)
