"""Ring attention (arXiv:2310.01889): tokens split over devices, keys and values passed on.

Every device has queries, keys and values of its own tokens (`zigzag.py`). In n turns each meets the
keys and values of all, a *chunk* a turn: while it computes with one, the next is under way from the
device before it. Results of the turns are merged by their log-sum-exp, so that what a device holds
at a time is its own part and two chunks: it grows with T / n. `around` is the other way about, for
keys that stay where they are (pages): there the queries travel, and what they have gathered.

A row's tokens lie one behind another in the step, so that a key is seen by the tokens behind it, up
to its row's end: causal attention between two blocks of the step, with those queries hidden that
belong to later rows. Distances between tokens of a row are those of their positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.dispatch import sibling_in
from jaxinfer.kernels.flash_attention import (
    BACKENDS,
    AttentionMask,
    ColumnIntervals,
    flash_attention,
    merge,
)
from jaxinfer.kernels.kv_pages import StoredTokens, dequantized
from jaxinfer.kernels.paged_attention.api import rows_at
from jaxinfer.sharding.zigzag import TokenSplit

FAR = 2**30  # behind any token of a step

# Blocks of queries and of keys that meet in a turn. Of the two that a device has, the early one
# never sees another's late one. A pair that sees nothing has no tile to visit: each turn is two
# blocks' work on every device, but the first, which is the same on all.
PAIRS = ((0, 0), (1, 0), (1, 1))


class Keep(NamedTuple):
    """What to do with the chunks of a ring: `store(state, chunk, device)` returns the next state,
    called with every device's chunk in turn."""

    store: Callable[[Any, StoredTokens, jax.Array], Any]
    state: Any


class Partial(NamedTuple):
    """Attention over some of the keys, for `merge`: of the two blocks of T / 2 tokens."""

    out: Float[Array, "two half N values"]
    lse: Float[Array, "two half N"]


def pass_on(x: Any, split: TokenSplit) -> Any:
    """To the next device of the ring; what the one before had comes in its place."""
    n = split.count
    return lax.ppermute(x, split.axis, [(i, (i + 1) % n) for i in range(n)])


def nothing_seen(split: TokenSplit, num_heads: int, value_dim: int) -> Partial:
    shape = (2, split.block_len, num_heads)
    return Partial(jnp.zeros((*shape, value_dim)), jnp.full(shape, -jnp.inf))


def merged(a: Partial, b: Partial) -> Partial:
    return Partial(*merge(*a, *b))


def ring_attention(
    q: Float[Array, "T N H"],
    chunk: StoredTokens,
    q_start: Int[Array, " R1"],
    split: TokenSplit,
    keep: Keep,
    variant: AttentionVariant,
    *,
    backend: str | None = None,
) -> tuple[Partial, Any]:
    """Attention of this device's T tokens to those of the whole step that their rows have in it.

    `chunk` is keys and values of the same T tokens, in the form in which pages keep them: so they
    travel, and so they are seen by every query, as those will be that come later. Returns the
    result and the last state of `keep`. Formula and `variant` as in
    `kernels/paged_attention/api.py`; sums in float32.
    """
    rank = lax.axis_index(split.axis)
    value_dim = variant.value_dim or q.shape[2]
    variant = dataclasses.replace(variant, value_dim=None)
    flash = partial(flash_attention, backend=sibling_in(BACKENDS, backend))

    def meet(turn, chunk, kept, found):
        device = (rank - turn) % split.count
        kept = keep.store(kept, chunk, device)
        seen = _of_chunk(flash, q, chunk, device, q_start, split, variant)
        seen = Partial(seen.out[..., :value_dim], seen.lse)
        return kept, merged(found, seen)

    def turn(i, carry):
        following = pass_on(carry[0], split)  # asked for first: it comes while this one is met
        return following, *meet(i, *carry)

    carry = (chunk, keep.state, nothing_seen(split, q.shape[1], value_dim))
    kept, found = meet(split.count - 1, *lax.fori_loop(0, split.count - 1, turn, carry))
    return found, kept


def around(
    q: Float[Array, "T N H"],
    split: TokenSplit,
    value_dim: int,
    attend: Callable[[jax.Array, jax.Array], Partial],
) -> Partial:
    """Attention of this device's T queries to keys that stay with their devices: `attend(q,
    device)` is that of a device's queries to the keys here.

    Queries are passed on before they are met, and what they gathered one turn later, so that it
    travels while they meet the next keys. (Two of 2n + 1 transfers carry nothing that is used: the
    loop is one body, and compiles as fast for 16 devices as for 2.)
    """
    rank = lax.axis_index(split.axis)

    def turn(i, carry):
        q, found = carry
        following, found = pass_on((q, found), split)
        return following, merged(found, attend(q, (rank - i) % split.count))

    nothing = nothing_seen(split, q.shape[1], value_dim)
    _, found = lax.fori_loop(0, split.count, turn, (q, nothing))
    return pass_on(found, split)


def _of_chunk(
    flash, q, chunk: StoredTokens, device, q_start, split: TokenSplit, variant: AttentionVariant
) -> Partial:
    """Return the attention of this device's queries to the keys and values of another's tokens."""
    M = split.block_len
    queries, keys = jnp.asarray(PAIRS).T
    paired = lambda x, which: x.reshape(2, M, *x.shape[1:])[which]
    numbers = lambda x, scales: paired(dequantized(x, scales).astype(q.dtype), keys)
    k = numbers(chunk.k, chunk.k_scales)
    v = k if chunk.v is None else numbers(chunk.v, chunk.v_scales)
    key_start = split.starts(device)
    hidden_from = row_ends(split.indices(device), q_start).reshape(2, M) - key_start[:, None]
    mask = AttentionMask(
        causal=True,
        q_offset=split.starts(lax.axis_index(split.axis))[queries] - key_start[keys],
        hidden=ColumnIntervals(hidden_from[keys][:, None], jnp.full((len(PAIRS), 1, M), FAR)),
    )
    out, lse = flash(paired(q, queries), k, v, variant, mask, return_lse=True)
    out = out.astype(jnp.float32)
    late = merge(out[1:2], lse[1:2], out[2:], lse[2:])
    joined = lambda early, late: jnp.concatenate([early, late])
    return Partial(joined(out[:1], late[0]), joined(lse[:1], late[1]))


def row_ends(index: Int[Array, " T"], q_start: Int[Array, " R1"]) -> Int[Array, " T"]:
    """Where the rows end that tokens `index` of the step belong to; of those behind the last row,
    where that ends, so that nothing sees them."""
    row = rows_at(index, q_start)
    return q_start[jnp.minimum(row + 1, q_start.shape[0] - 1)]
