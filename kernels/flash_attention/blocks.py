"""Which tiles of queries by keys a call has to visit, and in what order.

A *tile* is what a backend computes at once; a *block* is the unit of a `BlockMask`, a multiple of
the tile. A tile is empty (0, never touched), cut (1, needs its mask) or whole (2, needs none).
Where positions and lengths are known while tracing, so are the lists: NumPy makes them then, and
the program pays nothing for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxinfer.kernels.flash_attention.rule import BlockMask, FlashArrays, FlashRule, Mod

FAR = 2**30  # beyond any position


class TileWalk(NamedTuple):
    """For each tile of queries its tiles of keys, whole ones first; first axes of 1 are shared."""

    num_whole: Any  # [R or 1, N or 1, TQ]
    num_tiles: Any  # [R or 1, N or 1, TQ]
    tile: Any  # [R or 1, N or 1, TQ, TK]


def block_mask(
    mask_mod: Mod,
    num_queries: int,
    num_keys: int,
    *,
    rows: int = 1,
    heads: int = 1,
    q_offset: int = 0,
    q_block: int = 128,
    k_block: int = 128,
) -> BlockMask:
    """Evaluate `mask_mod` once, block by block, so that calls skip the blocks that it leaves empty.

    `rows` and `heads` are 1 where the mask does not depend on them, else R and N. `q_offset` must
    equal that of the calls. Costs one T x S pass, a row of blocks in memory at a time.
    """
    if q_block < 1 or k_block < 1:
        raise ValueError(f"blocks are {q_block} x {k_block}; both must be at least 1")
    TQ, TK = -(-num_queries // q_block), -(-num_keys // k_block)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None, None, None]
    head = jnp.arange(heads, dtype=jnp.int32)[:, None, None]
    s = jnp.arange(TK * k_block, dtype=jnp.int32)

    def kinds_of_row(i):
        t = i * q_block + jnp.arange(q_block, dtype=jnp.int32)[:, None]
        seen = mask_mod(row, head, q_offset + t, s)
        seen = jnp.broadcast_to(seen, (rows, heads, q_block, TK * k_block))
        is_real = (t < num_queries) & (s < num_keys)
        blocks = lambda x: x.reshape(rows, heads, q_block, TK, k_block)
        some = blocks(seen & is_real).any(axis=(2, 4))
        every = blocks(seen | ~is_real).all(axis=(2, 4))
        return some.astype(jnp.int32) + (some & every)

    kind = jax.lax.map(kinds_of_row, jnp.arange(TQ, dtype=jnp.int32))  # [TQ, rows, heads, TK]
    return BlockMask(jnp.moveaxis(kind, 0, 2), q_block, k_block, q_offset)


def fit(tile: int, block: int | None) -> int:
    """Return the largest tile size up to `tile` that divides a block."""
    if block is None:
        return tile
    return max(size for size in range(1, min(tile, block) + 1) if block % size == 0)


def is_static(*arrays: Any) -> bool:
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays))


def tile_kinds(rule: FlashRule, arrays: FlashArrays, T: int, S: int, tile: tuple[int, int]):
    """Return 0, 1 or 2 for each tile: [R or 1, N or 1, TQ, TK]. Some empty tiles count as cut."""
    parts = (arrays.q_offset, arrays.kv_len, arrays.hidden, arrays.block_mask)
    static = is_static(parts)
    xp: Any = np if static else jnp
    if static:
        arrays = jax.tree.map(np.asarray, arrays._replace(sinks=None, alibi_slopes=None))
    M, B = tile
    i = xp.arange(-(-T // M), dtype=np.int32)[:, None]
    j = xp.arange(-(-S // B), dtype=np.int32)
    axes = lambda x: xp.asarray(x, dtype=np.int32).reshape(-1, 1, 1, 1)
    first = axes(arrays.q_offset) + i * M  # [R or 1, 1, TQ, 1]
    last = axes(arrays.q_offset) + xp.minimum((i + 1) * M, T) - 1
    low, high = j * B, (j + 1) * B - 1
    length = axes(S if arrays.kv_len is None else xp.minimum(arrays.kv_len, S))
    some, whole = low < length, high < length
    if rule.causal:
        some, whole = some & (low <= last), whole & (high <= first)
    if rule.window is not None:
        some = some & (high > first - rule.window)
        whole = whole & (low > last - rule.window)
        if not rule.causal:
            some = some & (low < last + rule.window)
            whole = whole & (high < first + rule.window)
    if arrays.hidden is not None:
        some, whole = _without_hidden(xp, arrays.hidden, B, (some, whole), (first, last))
    mask = arrays.block_mask
    if mask is not None:
        kind = mask.kind[:, :, xp.minimum(i * M // mask.q_block, mask.kind.shape[2] - 1)[:, 0]]
        kind = kind[..., xp.minimum(j * B // mask.k_block, mask.kind.shape[3] - 1)]
        some, whole = some & (kind > 0), whole & (kind == 2)
    elif rule.mask_mod is not None:
        whole = whole & False
    some, whole, _ = xp.broadcast_arrays(some, whole, first)
    return some.astype(np.int32) + (some & whole)


def _without_hidden(xp, hidden, B: int, found, bounds):
    """Mark tiles that one interval hides from all queries as empty; keep those that none
    touches."""
    (some, whole), (first, last) = found, bounds
    R, C, S = hidden.start.shape
    is_empty = hidden.start >= hidden.end
    pads = ((0, 0), (0, 0), (0, -S % B))
    by_tile = lambda x, fill: xp.pad(x, pads, constant_values=fill).reshape(R, C, -1, B)
    for c in range(C):
        tiled = lambda x, unused, fill, c=c: by_tile(xp.where(is_empty, unused, x), fill)[:, c]
        start = tiled(hidden.start, FAR, -FAR).max(axis=-1)[:, None, None]  # [R, 1, 1, TK]
        end = tiled(hidden.end, -FAR, FAR).min(axis=-1)[:, None, None]
        some = some & ~((start <= first) & (end > last))
        start = tiled(hidden.start, FAR, FAR).min(axis=-1)[:, None, None]
        end = tiled(hidden.end, -FAR, -FAR).max(axis=-1)[:, None, None]
        whole = whole & ((start > last) | (end <= first))
    return some, whole


def walk_of(kinds) -> TileWalk:
    """Return the lists of tiles to visit, from `tile_kinds`."""
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    tile = xp.argsort(2 - kinds, axis=-1, stable=True).astype(np.int32)
    count = lambda is_one: is_one.sum(axis=-1).astype(np.int32)
    return TileWalk(count(kinds == 2), count(kinds > 0), tile)


def steps_of(kinds):
    """Return all tiles of a (row, head) in one list, for a grid: ([R or 1, N or 1, steps], counts).

    A step is (i * TK + j) * 16 + kind * 4 + 2 * (first of its tile of queries) + (last of it). A
    tile of queries that sees nothing has one step, of kind 0, so that its result is written.
    """
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    TQ, TK = kinds.shape[2:]
    j = xp.arange(TK, dtype=np.int32)
    is_step = (kinds > 0) | ((kinds == 0).all(axis=-1, keepdims=True) & (j == 0))
    flat = (*kinds.shape[:2], TQ * TK)
    order = xp.argsort(~is_step.reshape(flat), axis=-1, stable=True).astype(np.int32)
    count = is_step.reshape(flat).sum(axis=-1).astype(np.int32)
    kind = xp.take_along_axis(kinds.reshape(flat), order, axis=-1)
    i = order // TK
    index = xp.arange(TQ * TK, dtype=np.int32)
    is_first = (i != xp.roll(i, 1, axis=-1)) | (index == 0)
    is_last = (i != xp.roll(i, -1, axis=-1)) | (index == count[..., None] - 1)
    packed = order * 16 + kind * 4 + is_first * 2 + is_last
    return packed.astype(np.int32), count
