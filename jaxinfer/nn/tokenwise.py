"""Layers that treat each token by itself, and the tiles in which batch-invariant mode runs them.

A decoder's block is a chain of layers: norm, attention, norm, MLP. Only attention over the cache
combines tokens. `HiddenStates` runs the other layers immediately; in batch-invariant mode it
collects the layers between two attentions and runs them together, in one loop over tiles of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.kernels.batch_invariance import INVARIANT_TILE
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.update import Rotary
from jaxinfer.nn.attention import Attention
from jaxinfer.nn.latent_attention import LatentAttention
from jaxinfer.nn.layers import LayerNorm, NoNorm, Numerics, RMSNorm
from jaxinfer.nn.ragged import RaggedBatch

Norm = RMSNorm | LayerNorm | NoNorm


def tokenwise(numerics: Numerics, function: Callable[..., Any], *arrays: Any) -> Any:
    """Return `function(*arrays)`, where axis 0 of all arrays and results is the tokens.

    `function` treats each token by itself. In batch-invariant mode the tokens pass through it in
    tiles of `INVARIANT_TILE`. One loop body computes every token, whatever else is in the batch, so
    a token's bits are always the same.
    """
    if not numerics.batch_invariant:
        return function(*arrays)
    T, tile = jax.tree.leaves(arrays)[0].shape[0], INVARIANT_TILE

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -T % tile)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, tile, *x.shape[1:])

    tiles = jax.tree.map(cut, arrays)
    num_tiles = jax.tree.leaves(tiles)[0].shape[0]

    def run_tile(i: Any) -> Any:
        at = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
        return function(*jax.tree.map(at, tiles))

    def body(i: jax.Array, done: Any) -> Any:
        put = lambda x, value: jax.lax.dynamic_update_index_in_dim(x, value, i, 0)
        return jax.tree.map(put, done, run_tile(i))

    one = jax.eval_shape(lambda: run_tile(0))
    empty = jax.tree.map(lambda x: jnp.zeros((num_tiles, *x.shape), x.dtype), one)
    # XLA inlines a loop that it knows to run once, and fuses its sums with the surrounding
    # operations. That changes rounding (Granite on a CPU: 5e-7 in a log-probability).
    count = jax.lax.optimization_barrier(jnp.int32(num_tiles))
    results = jax.lax.fori_loop(0, count, body, empty)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:T], results)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "residual"],
    meta_fields=["numerics", "pending"],
)
@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """The hidden states between two layers: `x`, the next layer's input, and the residual stream.

    The next norm adds `x` to the residual stream in the same pass over memory. `residual` is None
    before the first norm. `pending` are functions that are not yet applied to `x` and `residual`;
    only batch-invariant mode has any, until `computed` is called.
    """

    x: Any  # [T, D]; within attention, its projections or its output
    residual: Float[Array, "T D"] | None
    numerics: Numerics
    pending: tuple[Callable[[Any, Any], tuple[Any, Any]], ...] = ()

    def then(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> HiddenStates:
        """Pass `x, residual` through a function that treats each token by itself."""
        if self.numerics.batch_invariant:
            return dataclasses.replace(self, pending=(*self.pending, function))
        x, residual = function(self.x, self.residual)
        return dataclasses.replace(self, x=x, residual=residual)

    def apply(self, layer: Callable[[Any], Any]) -> HiddenStates:
        """Pass `x` through a layer that treats each token by itself."""
        return self.then(lambda x, residual: (layer(x), residual))

    def add_norm(self, norm: Norm) -> HiddenStates:
        """Add `x` to the residual stream, and replace `x` by the norm of the sum."""
        return self.then(norm.add_norm)

    def attend(
        self,
        attention: Attention | LatentAttention,
        angles: Rotary | None,
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[HiddenStates, KVPages]:
        """Pass `x` through attention; also return the pages with the new keys and values.

        In batch-invariant mode its projections share loops over tiles with the adjacent layers.
        """
        projected = self.apply(attention.project_in).computed()
        attended, pages = attention.attend(*projected.x, angles=angles, batch=batch, pages=pages)
        hidden = dataclasses.replace(projected, x=attended)
        return hidden.apply(attention.project_out), pages

    def computed(self) -> HiddenStates:
        """Apply the pending functions, in one loop over tiles of tokens."""
        if not self.pending:
            return self

        def run(x: Any, residual: Any) -> tuple[Any, Any]:
            for function in self.pending:
                x, residual = function(x, residual)
            return x, residual

        x, residual = tokenwise(self.numerics, run, self.x, self.residual)
        return HiddenStates(x, residual, self.numerics)

    def total(self) -> Float[Array, "T D"]:
        """Return the sum of the residual stream and `x`."""
        hidden = self.computed()
        return hidden.x if hidden.residual is None else hidden.residual + hidden.x
