"""How a Hopper GPU divides a call of paged attention: what is compiled in, and the list of work.

The queries are cut into *items*, runs of at most `tile` tokens of one row; an item and a KV head
make a *unit*, the work of one CTA. An item sees a run of *blocks* of `block` tokens. Those between
the oldest ones, which a window cuts, and the newest ones, which causality cuts, are *whole*: all
queries of the item see all of their tokens, and the kernel masks nothing.

Tokens of no row make items of no blocks, so that the kernel writes their zeros.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

WARPGROUP_ROWS = 64  # rows of a product of one warpgroup


class HopperItem(NamedTuple):
    """Fields of an item, in the order of the columns of the list."""

    row: jax.Array
    first: jax.Array  # its first token
    count: jax.Array  # its tokens; 0: no item
    position: jax.Array  # that of its first token in the row
    begin: jax.Array  # its blocks are [begin, end)
    whole_begin: jax.Array  # whole ones are [whole_begin, whole_end)
    whole_end: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True)
class HopperPlan:
    """What the kernel is compiled for."""

    num_tokens: int  # T
    num_rows: int  # R
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    page_size: int  # B
    num_items: int
    warpgroups: int  # warpgroups that compute; one more copies
    block: int  # tokens of a step of the softmax
    slots: int  # blocks being loaded at the same time
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    has_slopes: bool
    has_lse: bool
    is_emulated: bool

    @property
    def group(self) -> int:
        """Query heads of a KV head: G."""
        return self.num_heads // self.num_kv_heads

    @property
    def share(self) -> int:
        """The most tokens of an item that one warpgroup computes."""
        return WARPGROUP_ROWS // self.group

    @property
    def tile(self) -> int:
        """The most tokens of an item."""
        return self.share * self.warpgroups

    @property
    def pages_a_block(self) -> int:
        """Copies that bring a block; a page of several blocks is copied block by block."""
        return max(1, self.block // self.page_size)

    @property
    def tokens_a_copy(self) -> int:
        return min(self.block, self.page_size)

    @property
    def lanes_at_once(self) -> int:
        """Lanes of a result that are stored at once."""
        return lanes_at_once(self.head_dim)


def lanes_at_once(head_dim: int) -> int:
    """Return the lanes of a result that are stored at once: all 256 would leave no room for two
    blocks and 128 queries."""
    return head_dim if head_dim <= 128 else 64


def num_items(T: int, R: int, tile: int) -> int:
    """Return how many items T tokens of R rows, and those of no row, can make."""
    return min(T, R + 1 + T // tile)


def tile_ends(tile: int, T: int, q_start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the token bounds of the rows and of the padding, [R + 2], and the items up to each."""
    bounds = jnp.concatenate([q_start, jnp.full((1,), T, q_start.dtype)])
    tiles = -(-jnp.diff(bounds) // tile)
    each = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    # A sum over a matrix of comparisons, since XLA makes several launches of a `cumsum`.
    ends = jnp.where(each[:, None] >= each, tiles, 0).sum(axis=1, dtype=jnp.int32)
    return bounds, ends


def work_list(plan: HopperPlan, q_start: jax.Array, kv_len: jax.Array) -> jax.Array:
    """Return the items (`HopperItem`) in the order of the tokens, [items, 8]; zeros follow the
    last.

    It depends on the batch alone, so the layers of a model share it.
    """
    R, M, S = kv_len.shape[0], plan.tile, plan.block
    bounds, ends = tile_ends(M, plan.num_tokens, q_start)
    index = jnp.arange(plan.num_items, dtype=jnp.int32)
    row = (ends <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    is_item, row = row <= R, jnp.minimum(row, R)
    begins = jnp.where(row > 0, ends[row - 1], 0)
    first = bounds[row] + (index - begins) * M
    count = jnp.minimum(bounds[row + 1] - first, M)
    has_row, row = row < R, jnp.minimum(row, R - 1)
    position = kv_len[row] - (q_start[row + 1] - first)
    last = position + count - 1
    if plan.window is None:
        begin = whole_begin = jnp.zeros_like(position)
    else:
        begin = jnp.maximum(position - plan.window + 1, 0) // S
        whole_begin = -(-jnp.maximum(last - plan.window + 1, 0) // S)
    end = jnp.where(has_row, last // S + 1, begin)
    whole_begin = jnp.clip(whole_begin, begin, end)
    whole_end = jnp.clip((position + 1) // S, whole_begin, end)
    item = HopperItem(row, first, count, position, begin, whole_begin, whole_end, end)
    return jnp.stack([jnp.where(is_item, x, 0) for x in item], axis=1).astype(jnp.int32)


def lse_of_tokens(plan: HopperPlan, parts: jax.Array, q_start: jax.Array) -> jax.Array:
    """Return lse [T, N] from what the units wrote, [K, items, warpgroups, 64]; -inf for tokens of
    no row."""
    T, K, G = plan.num_tokens, plan.num_kv_heads, plan.group
    bounds, ends = tile_ends(plan.tile, T, q_start)
    token = jnp.arange(T, dtype=jnp.int32)
    row = (bounds[1:] <= token[:, None]).sum(axis=1, dtype=jnp.int32)
    begins = jnp.where(row > 0, ends[row - 1], 0)
    place = token - bounds[row]
    item, place = begins + place // plan.tile, place % plan.tile
    used = parts[..., : plan.share * G].reshape(K, -1, plan.tile, G)
    lse = used[:, item, place]  # [K, T, G]
    lse = jnp.moveaxis(lse, 0, 1).reshape(T, plan.num_heads)
    return jnp.where((row < plan.num_rows)[:, None], lse, -jnp.inf)
