"""Flash attention in plain JAX: online softmax over those tiles of keys that are seen.

One loop over (row, tile of queries), all heads together; where the mask differs by head, over
(row, head, tile). Each walks first the tiles of keys that need no mask, then those that do. Formula
and contract: `api.py`; which tiles: `blocks.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.kernels.flash_attention.blocks import fit, tile_kinds, walk_of
from jaxinfer.kernels.flash_attention.rule import FlashArrays, FlashRule, is_seen, scores

TILE = (128, 256)  # queries, keys

# Below any score, and finite: exp(-inf - LOWEST) is 0 where -inf for both would give NaN.
LOWEST = -1e30


class _Call(NamedTuple):
    """Operands laid out for the loop."""

    q: jax.Array  # [R, K, G, T', H], T' and S' whole tiles
    k: jax.Array  # [R, K, S', H]
    v: jax.Array  # [R, K, S', H]
    offsets: jax.Array  # [R]
    lengths: jax.Array  # [R]
    arrays: FlashArrays
    rule: FlashRule
    tile: tuple[int, int]


def flash_attention(
    q,  # [R, T, N, H]
    k,  # [R, S, K, H]
    v,  # [R, S, K, H]
    arrays: FlashArrays,
    rule: FlashRule,
    *,
    tile: tuple[int, int] = TILE,
):
    R, T, N, H = q.shape
    S, K = k.shape[1:3]
    mask, G = arrays.block_mask, N // K
    M = fit(min(tile[0], T), mask.q_block if mask else None)
    B = fit(min(tile[1], S), mask.k_block if mask else None)
    kinds = tile_kinds(rule, arrays, T, S, (M, B))
    walk = jax.tree.map(jnp.asarray, walk_of(kinds))
    rows, heads, TQ, TK = kinds.shape
    pad = lambda x, size: jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
    if arrays.hidden is not None:
        wide = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, TK * B - S)))
        arrays = arrays._replace(hidden=jax.tree.map(wide, arrays.hidden))
    call = _Call(
        jnp.moveaxis(pad(q, TQ * M).reshape(R, TQ * M, K, G, H), 1, 3),
        pad(k, TK * B).swapaxes(1, 2),
        pad(v, TK * B).swapaxes(1, 2),
        arrays.offsets(R),
        arrays.lengths(R, S),
        arrays,
        rule,
        (M, B),
    )
    units = R * (N if heads > 1 else 1)

    def attend_tile(u, carry):
        out, lse = carry
        unit, i = u // TQ, u % TQ
        row = unit // N if heads > 1 else unit
        head = unit % N if heads > 1 else jnp.int32(0)
        at = (row if rows > 1 else 0, head, i)
        lists = (walk.num_whole[at], walk.num_tiles[at], walk.tile[at])
        tile_out, tile_lse = _attend(call, lists, row, head, i, all_heads=heads == 1)
        start = (row, head // G, head % G, i * M)
        out = jax.lax.dynamic_update_slice(out, tile_out[None].astype(out.dtype), (*start, 0))
        return out, jax.lax.dynamic_update_slice(lse, tile_lse[None], start)

    empty = (jnp.zeros_like(call.q), jnp.zeros(call.q.shape[:-1], jnp.float32))
    out, lse = jax.lax.fori_loop(0, units * TQ, attend_tile, empty)
    out = jnp.moveaxis(out, 3, 1).reshape(R, TQ * M, N, H)[:, :T]
    lse = jnp.moveaxis(lse, 3, 1).reshape(R, TQ * M, N)[:, :T]
    return out, lse if rule.return_lse else None


def _attend(call: _Call, lists, row, head, i, *, all_heads: bool):
    """Attend from one tile of queries of one row, all heads or one: ([K, G, M, H], lse [K, G,
    M])."""
    num_whole, num_tiles, tiles = lists
    (M, B), (_, K, G, _, H), rule = call.tile, call.q.shape, call.rule
    start = (row, head // G, head % G, i * M, 0)
    sizes = (K, G) if all_heads else (1, 1)
    heads = jnp.arange(K * G, dtype=jnp.int32).reshape(K, G) if all_heads else head.reshape(1, 1)
    per_head = lambda x: x.astype(jnp.float32)[heads][..., None, None]
    exact = jax.lax.Precision.HIGHEST if call.q.dtype == jnp.float32 else None
    q = jax.lax.dynamic_slice(call.q, start, (1, *sizes, M, H))[0].astype(jnp.float32)
    q_position = call.offsets[row] + i * M + jnp.arange(M, dtype=jnp.int32)[:, None]
    slopes = None if call.arrays.alibi_slopes is None else per_head(call.arrays.alibi_slopes)
    length = call.lengths[row]

    def read(x, j):  # [K, B, H]
        at = (row, start[1], j * B, 0)
        return jax.lax.dynamic_slice(x, at, (1, sizes[0], B, H))[0].astype(jnp.float32)

    def step(j, carry, *, is_cut: bool):
        top, total, acc = carry  # [K, G, M, 1], the same, [K, G, M, H]
        s = j * B + jnp.arange(B, dtype=jnp.int32)
        z = jnp.einsum("kgmh,ksh->kgms", q, read(call.k, j), precision=exact) * rule.scale
        z = scores(rule, z, row, heads[..., None, None], q_position, s, slopes)
        v_tile = read(call.v, j)
        if is_cut:
            intervals = _intervals(call.arrays.hidden, row, j * B, B)
            at = (row, heads[..., None, None], q_position, s)
            z = jnp.where(is_seen(rule, *at, length, intervals), z, -jnp.inf)
            v_tile = jnp.where((s < length)[:, None], v_tile, 0)  # 0 times NaN would be NaN
        new_top = jnp.maximum(top, z.max(axis=-1, keepdims=True))
        weight, fade = jnp.exp(z - new_top), jnp.exp(top - new_top)
        new = jnp.einsum("kgms,ksh->kgmh", weight, v_tile, precision=exact)
        return new_top, total * fade + weight.sum(axis=-1, keepdims=True), acc * fade + new

    if call.arrays.sinks is not None:  # one more score, without a value
        top = jnp.broadcast_to(per_head(call.arrays.sinks), (*sizes, M, 1))
        total = jnp.ones_like(top)
    else:
        top = jnp.full((*sizes, M, 1), LOWEST, jnp.float32)
        total = jnp.zeros_like(top)
    carry = (top, total, jnp.zeros((*sizes, M, H), jnp.float32))
    for bounds, is_cut in (((0, num_whole), False), ((num_whole, num_tiles), True)):
        take = lambda n, carry, is_cut=is_cut: step(tiles[n], carry, is_cut=is_cut)
        carry = jax.lax.fori_loop(*bounds, take, carry)
    top, total, acc = carry
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return acc / jnp.where(total == 0, 1, total), lse[..., 0]


def _intervals(hidden, row, first, size: int):
    """Return the pairs (start, end) of a tile's keys, [B] each."""
    if hidden is None:
        return ()
    read = lambda x, c: jax.lax.dynamic_slice(x, (row, c, first), (1, 1, size))[0, 0]
    return [(read(hidden.start, c), read(hidden.end, c)) for c in range(hidden.start.shape[1])]
