"""What every token does by itself: at once, or in tiles of tokens in the batch-invariant mode.

A block of a decoder is a chain: norm, attention, norm, MLP. Attention over the cache is the one
link in which tokens meet. `HiddenStates` runs the others at once, or, in the batch-invariant mode,
collects all those between two attentions and runs them together in one loop over tiles.
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

    `function` treats each token by itself. In the batch-invariant mode the tokens pass through it
    in tiles of `INVARIANT_TILE`: a token's arithmetic is that of one loop body whatever else is in
    the batch, so its bits are the same.
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
    # A loop that is known to run once is inlined, and its sums are fused with what surrounds it: a
    # residual's multiple then rounds otherwise (Granite on a CPU: 5e-7 in a log-probability).
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
    """The tokens of a step between two layers: `x`, which the next layer takes, and the residual
    stream, to which `x` is added by the next norm, in one pass over memory.

    `residual` is None before the first norm. `pending` are the layers that `x` and `residual` have
    yet to pass; there are some in the batch-invariant mode only, until `computed`.
    """

    x: Any  # [T, D], or what stands in its place between the parts of attention
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
        """Add `x` to the residual stream; `x` is the sum's norm then."""
        return self.then(norm.add_norm)

    def attend(
        self,
        attention: Attention | LatentAttention,
        angles: Rotary | None,
        batch: RaggedBatch,
        pages: KVPages,
    ) -> tuple[HiddenStates, KVPages]:
        """Pass `x` through attention over the cache; also the pages with the new keys and values.

        Layers before and after it share loops over tiles with its projections.
        """
        projected = self.apply(attention.project_in).computed()
        attended, pages = attention.attend(*projected.x, angles=angles, batch=batch, pages=pages)
        hidden = dataclasses.replace(projected, x=attended)
        return hidden.apply(attention.project_out), pages

    def computed(self) -> HiddenStates:
        """Run what is pending, in one loop over tiles of tokens."""
        if not self.pending:
            return self

        def run(x: Any, residual: Any) -> tuple[Any, Any]:
            for function in self.pending:
                x, residual = function(x, residual)
            return x, residual

        x, residual = tokenwise(self.numerics, run, self.x, self.residual)
        return HiddenStates(x, residual, self.numerics)

    def total(self) -> Float[Array, "T D"]:
        """The residual stream with `x` added to it."""
        hidden = self.computed()
        return hidden.x if hidden.residual is None else hidden.residual + hidden.x
