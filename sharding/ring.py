"""Ring attention (arXiv:2310.01889): tokens are split over devices, keys and values travel round.

Every device has the queries, keys and values of its own tokens (`zigzag.py`). In each of n
iterations it attends to one device's keys and values, a *chunk*, while the next chunk arrives from
its neighbour. The partial results are merged by their log-sum-exp. A device thus stores its own
part and two chunks at a time, which is proportional to T / n. `query_ring_attention` is the
converse, for keys that stay in their pages: the queries and their partial results travel.

The tokens of a row are consecutive in the step, so a key is visible to the tokens after it, up to
the end of its row: causal attention between two blocks of the step, with the queries of later rows
masked. The distance of two tokens of a row in the step is that of their positions.
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

FAR = 2**30  # beyond any token of a step

# The pairs (block of queries, block of keys) of one iteration. Of a device's two blocks, the early
# one never sees another device's late one. A pair that sees nothing has no tile to visit, so each
# iteration is two blocks' work on every device, except the first, which is the same on all.
PAIRS = ((0, 0), (1, 0), (1, 1))


class ChunkStore(NamedTuple):
    """How to store the chunks that pass by.

    `store(state, chunk, device)` is called with every device's chunk in turn and returns the next
    state.
    """

    store: Callable[[Any, StoredTokens, jax.Array], Any]
    state: Any


class PartialAttention(NamedTuple):
    """Attention of a device's two blocks of tokens to some of the keys."""

    out: Float[Array, "two half N values"]
    lse: Float[Array, "two half N"]


def shift(x: Any, split: TokenSplit) -> Any:
    """Send x to the next device of the ring; return what the previous one sent."""
    n = split.count
    return lax.ppermute(x, split.axis, [(i, (i + 1) % n) for i in range(n)])


def empty_partial(split: TokenSplit, num_heads: int, value_dim: int) -> PartialAttention:
    """Return attention to no keys, the neutral element of `merge_partials`."""
    shape = (2, split.block_len, num_heads)
    return PartialAttention(jnp.zeros((*shape, value_dim)), jnp.full(shape, -jnp.inf))


def merge_partials(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Return attention to the keys of both."""
    return PartialAttention(*merge(*a, *b))


def ring_attention(
    q: Float[Array, "T N H"],
    chunk: StoredTokens,
    q_start: Int[Array, " R1"],
    split: TokenSplit,
    chunks: ChunkStore,
    variant: AttentionVariant,
    *,
    backend: str | None = None,
) -> tuple[PartialAttention, Any]:
    """Return the attention of this device's T tokens to all tokens of the step, and a state.

    `chunk` has the keys and values of the same T tokens, in the format of the pages: quantized keys
    travel quantized, and every query sees the values that later queries will read. The state is the
    last one of `chunks`. Formula and `variant` as in `kernels/paged_attention/api.py`; sums in
    float32.
    """
    rank = lax.axis_index(split.axis)
    value_dim = variant.value_dim or q.shape[2]
    variant = dataclasses.replace(variant, value_dim=None)
    flash = partial(flash_attention, backend=sibling_in(BACKENDS, backend))

    def attend(i, chunk, state, total):
        device = (rank - i) % split.count
        state = chunks.store(state, chunk, device)
        part = _attend_to_chunk(flash, q, chunk, device, q_start, split, variant)
        part = PartialAttention(part.out[..., :value_dim], part.lse)
        return state, merge_partials(total, part)

    def body(i, carry):
        next_chunk = shift(carry[0], split)  # first, so that it overlaps with the attention
        return next_chunk, *attend(i, *carry)

    carry = (chunk, chunks.state, empty_partial(split, q.shape[1], value_dim))
    last = split.count - 1
    state, total = attend(last, *lax.fori_loop(0, last, body, carry))
    return total, state


def query_ring_attention(
    q: Float[Array, "T N H"],
    split: TokenSplit,
    value_dim: int,
    attend: Callable[[jax.Array, jax.Array], PartialAttention],
) -> PartialAttention:
    """Return the attention of this device's T queries to keys that stay on their devices.

    `attend(q, device)` computes the attention of a device's queries to the keys here. Queries are
    sent on before they are used, and their partial results one iteration later, so that both
    overlap with the attention. (Two of 2n + 1 transfers carry nothing that is used; in exchange the
    loop has one body, which compiles as fast for 16 devices as for 2.)
    """
    rank = lax.axis_index(split.axis)

    def body(i, carry):
        q, total = carry
        next_q, total = shift((q, total), split)
        return next_q, merge_partials(total, attend(q, (rank - i) % split.count))

    empty = empty_partial(split, q.shape[1], value_dim)
    _, total = lax.fori_loop(0, split.count, body, (q, empty))
    return shift(total, split)


def _attend_to_chunk(
    flash, q, chunk: StoredTokens, device, q_start, split: TokenSplit, variant: AttentionVariant
) -> PartialAttention:
    """Return the attention of this device's queries to the keys and values of another's tokens."""
    M = split.block_len
    queries, keys = jnp.asarray(PAIRS).T
    select = lambda x, blocks: x.reshape(2, M, *x.shape[1:])[blocks]
    values_of = lambda x, scales: select(dequantized(x, scales).astype(q.dtype), keys)
    k = values_of(chunk.k, chunk.k_scales)
    v = k if chunk.v is None else values_of(chunk.v, chunk.v_scales)
    key_start = split.starts(device)
    hidden_from = row_ends(split.indices(device), q_start).reshape(2, M) - key_start[:, None]
    mask = AttentionMask(
        causal=True,
        q_offset=split.starts(lax.axis_index(split.axis))[queries] - key_start[keys],
        hidden=ColumnIntervals(hidden_from[keys][:, None], jnp.full((len(PAIRS), 1, M), FAR)),
    )
    out, lse = flash(select(q, queries), k, v, variant, mask, return_lse=True)
    out = out.astype(jnp.float32)
    late = merge(out[1:2], lse[1:2], out[2:], lse[2:])
    join = lambda early, late: jnp.concatenate([early, late])
    return PartialAttention(join(out[:1], late[0]), join(lse[:1], late[1]))


def row_ends(index: Int[Array, " T"], q_start: Int[Array, " R1"]) -> Int[Array, " T"]:
    """Return the end of the row of each token `index` of the step.

    For padding it is the end of the last row, so that no query sees a padding token.
    """
    row = rows_at(index, q_start)
    return q_start[jnp.minimum(row + 1, q_start.shape[0] - 1)]
