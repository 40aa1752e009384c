"""How a GPU divides a call of paged attention: what is compiled in, and the list of its work.

The queries are cut into *items*, runs of at most `tile` tokens of one row. An item sees a run of
*blocks* of `block` tokens, once for each KV head: a *unit* of work. All units' blocks, laid end to
end (item by item, in an item head by head), are one sequence, of which every program of the grid
gets an equal stretch, whatever the rows' lengths are (Stream-K, arXiv:2301.03598).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# Fields of an item, in the order of the rows of the list. END is the number of blocks of one KV
# head up to and including the item, so that the last one is the length of the sequence.
ROW, FIRST, COUNT, POSITION, BLOCK, NUM_BLOCKS, END = range(7)


@dataclasses.dataclass(frozen=True)
class GpuPagedPlan:
    """What the kernel is compiled for; its only constexpr."""

    num_tokens: int  # T
    num_rows: int  # R
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    page_size: int  # B
    table_width: int  # W
    num_items: int
    programs: int
    row_block: int  # rows of a product: a tile's tokens times the heads of a group, and padding
    block: int  # tokens of a step of the softmax
    stages: int  # blocks on their way from memory at the same time
    scale: float
    window: int | None
    soft_cap: float | None
    is_wide: bool  # products of float32
    is_fp8: bool  # pages of float8_e4m3fn, handed over as int8
    has_scales: bool
    has_sinks: bool
    has_slopes: bool
    has_lse: bool
    is_split: (
        bool  # stretches may cut units; otherwise a unit belongs to the program where it begins
    )

    @property
    def group(self) -> int:
        """Query heads of a KV head: G."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile(self) -> int:
        """Tokens of an item, at most."""
        return self.row_block // self.group

    @property
    def lanes(self) -> int:
        """The head dim, padded to what a product takes."""
        return power_of_two(self.head_dim, 16)

    @property
    def precision(self) -> str:
        """How products of float32 are made: by three of tensor cores, right to some 2e-7.

        By multiply-adds the 128 x 128 sums of a chunk's tile do not fit registers (39 kB spilled,
        sm_80 and sm_90)."""
        return "tf32x3" if self.is_wide else "ieee"

    @property
    def items_padded(self) -> int:
        return power_of_two(self.num_items)

    @property
    def page_len(self) -> int:
        """Numbers of a page."""
        return self.num_kv_heads * self.page_size * self.head_dim

    @property
    def merged_lanes(self) -> int:
        """Lanes of parts that are merged together; few, since the walk needs the registers."""
        return min(self.lanes, max(16, 4096 // self.row_block))

    @property
    def merged_at_once(self) -> int:
        """Parts loaded at the same time: with their lanes, 32 registers a thread of 128."""
        return max(1, 4096 // (self.row_block * self.merged_lanes))


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is neither below n nor below `least`."""
    return max(least, 1 << (n - 1).bit_length())


def num_items(T: int, R: int, tile: int) -> int:
    """Return how many items T tokens of R rows can make."""
    return min(T, R + T // tile)


def work_list(plan: GpuPagedPlan, q_start: jax.Array, kv_len: jax.Array) -> jax.Array:
    """Return the items in the order of the rows, [7, items]; items of no blocks follow the last.

    It depends on the batch alone, so the layers of a model share it. Sums over a matrix of
    comparisons in place of `cumsum`, of which XLA makes several launches.
    """
    R, M, S = kv_len.shape[0], plan.tile, plan.block
    each = jnp.arange(R, dtype=jnp.int32)
    tiles = -(-jnp.diff(q_start) // M)
    tile_ends = jnp.where(each[:, None] >= each, tiles, 0).sum(axis=1, dtype=jnp.int32)
    index = jnp.arange(plan.num_items, dtype=jnp.int32)
    row = (tile_ends <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    is_item, row = row < R, jnp.minimum(row, R - 1)
    first = q_start[row] + (index - (tile_ends - tiles)[row]) * M
    count = jnp.minimum(q_start[row + 1] - first, M)
    position = kv_len[row] - (q_start[row + 1] - first)
    oldest = 0 if plan.window is None else jnp.maximum(position - plan.window + 1, 0)
    block = jnp.broadcast_to(oldest // S, index.shape)
    num_blocks = jnp.where(is_item, (position + count - 1) // S + 1 - block, 0)
    ends = jnp.where(index[:, None] >= index, num_blocks, 0).sum(axis=1, dtype=jnp.int32)
    return jnp.stack([row, first, count, position, block, num_blocks, ends]).astype(jnp.int32)
