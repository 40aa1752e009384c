"""Paged attention in plain JAX: online softmax over blocks of pages, cost following real lengths.

The queries are cut into *tiles*, each a run of tokens of one row. Rows with one query (decodes) are
tiles of one token, taken several at a time, longest first, so that rows of like length walk their
pages together; longer runs (prefill chunks) are tiles of up to `CHUNK_TILE` tokens, one at a time.
A tile walks only the blocks its positions can see. Formula and contract: `api.py`.

Measured on 2 cores (jax 0.10.2, SmolLM2's heads, 30 layers): a page layout of [P, K, B, H] makes
every operand of the two products contiguous; with [P, B, K, H] the walk took 2.5 times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.kv_pages import KVPages, dequantized
from jaxinfer.kernels.paged_attention.page_part import WHOLE, PagePart
from jaxinfer.kernels.paged_attention.rows import RaggedRows

DECODE_TILES = 16  # rows that walk their pages together
DECODE_BLOCK = 64  # tokens a step of that walk
CHUNK_TILE = 128  # query tokens in a tile of a prefill chunk
CHUNK_BLOCK = 256  # tokens a step of its walk

# A finite stand-in for -inf: exp(MASKED - MASKED) is 1 where -inf would give NaN; weights of
# masked positions are set to zero explicitly.
MASKED = -1e30


class _Pages(NamedTuple):
    stored: KVPages  # k, v: [P, K, B, H]
    value_dim: int
    part: PagePart


class _Tiles(NamedTuple):
    """M tiles of `length` queries, of which the first `count` are there; `at_once` of them walk
    their pages together, `block_len` tokens a step."""

    row: jax.Array  # [M]
    first: jax.Array  # [M]: the tile's first token
    count: jax.Array  # []
    at_once: int
    length: int
    block_len: int


def paged_attention(
    q,  # [T, N, H]
    rows: RaggedRows,
    pages: KVPages,  # k, v: [P, K, B, H]
    variant: AttentionVariant,
    *,
    part: PagePart = WHOLE,
    return_lse: bool = False,
):
    """Return (out [T, N, H or value_dim], lse [T, N] or None)."""
    q_start, kv_len = rows.q_start, rows.kv_len
    T, R = q.shape[0], kv_len.shape[0]
    cache = _Pages(pages, variant.value_dim or q.shape[2], part)
    q_len = jnp.diff(q_start)
    lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32) if return_lse else None
    out = (jnp.zeros((*q.shape[:2], cache.value_dim), q.dtype), lse)

    # Single queries, longest row first; the others sort to the end and are not counted.
    is_single = q_len == 1
    order = jnp.argsort(jnp.where(is_single, -kv_len, 1)).astype(jnp.int32)
    singles = _Tiles(order, q_start[order], is_single.sum(), min(DECODE_TILES, R), 1, DECODE_BLOCK)
    out = _run_tiles(out, q, rows, cache, variant, singles)
    if T == 1:
        return out  # the only size that no chunk fits in

    tile_len = min(CHUNK_TILE, T)
    num_tiles = jnp.where(q_len > 1, -(-q_len // tile_len), 0)  # [R]
    ends = jnp.cumsum(num_tiles)
    tile = jnp.arange(T // 2 + 1, dtype=q_start.dtype)  # a chunk's tile is at least 2 tokens
    tile_row = jnp.minimum(
        jnp.searchsorted(ends, tile, side="right", method="compare_all"), R - 1
    ).astype(jnp.int32)
    within = tile - (ends - num_tiles)[tile_row]
    first = q_start[tile_row] + within * tile_len
    chunks = _Tiles(tile_row, first, ends[-1], 1, tile_len, CHUNK_BLOCK)
    return _run_tiles(out, q, rows, cache, variant, chunks)


def _run_tiles(
    out,  # [T, N, value_dim], and [T, N] or None
    q,  # [T, N, H]
    rows: RaggedRows,
    pages: _Pages,
    variant: AttentionVariant,
    tiles: _Tiles,
):
    """Fill `out` for the tiles, `tiles.at_once` in each iteration of a loop."""
    T, C = q.shape[0], tiles.at_once
    pages_a_block = max(1, tiles.block_len // pages.stored.k.shape[2])
    pad_tiles = -tiles.row.shape[0] % C
    tile_row, tile_first = (jnp.pad(x, (0, pad_tiles)) for x in (tiles.row, tiles.first))
    pad_pages = -rows.page_table.shape[1] % pages_a_block
    rows = rows._replace(page_table=jnp.pad(rows.page_table, ((0, 0), (0, pad_pages))))

    def run_together(i, out):
        row = jax.lax.dynamic_slice(tile_row, (i * C,), (C,))
        first = jax.lax.dynamic_slice(tile_first, (i * C,), (C,))
        token = first[:, None] + jnp.arange(tiles.length)  # [C, M]
        end = rows.q_start[row + 1]
        is_query = (token < end[:, None]) & (i * C + jnp.arange(C) < tiles.count)[:, None]
        position = jnp.where(is_query, rows.kv_len[row][:, None] - end[:, None] + token, -1)
        token = jnp.where(is_query, token, T)  # past the end: read clipped, write dropped
        reach = position
        if rows.key_limit is not None:
            reach = jnp.minimum(position, rows.key_limit[row][:, None] - 1)
        tile_out = _attend(
            q.at[token].get(mode="clip"), position, reach, pages,
            rows.page_table[row], pages_a_block, variant,
        )  # fmt: skip
        put = lambda out, x: out.at[token].set(x.astype(out.dtype), mode="drop")
        return tuple(None if o is None else put(o, x) for o, x in zip(out, tile_out, strict=True))

    return jax.lax.fori_loop(0, -(-tiles.count // C), run_together, out)


def _attend(
    q,  # [C, M, N, H]
    position,  # [C, M], -1 for no query
    reach,  # [C, M], the last position that the query sees
    pages: _Pages,
    page_table,  # [C, W]
    pages_a_block: int,
    variant: AttentionVariant,
):
    """Attend from C tiles of M queries by one online softmax (arXiv:2205.14135): (out [C, M, N,
    value_dim], lse [C, M, N])."""
    C, M, N, H = q.shape
    stored = pages.stored
    _, K, B, _ = stored.k.shape
    G, S = N // K, pages_a_block * B

    # [C, K, G*M, H]: the queries that share a KV head are the rows of one product.
    q = q.astype(jnp.float32) * variant.scale
    q = jnp.moveaxis(q.reshape(C, M, K, G, H), 1, 3).reshape(C, K, G * M, H)
    per_query = lambda x: jnp.tile(x[:, None, :], (1, G, 1)).reshape(C, 1, G * M)  # [C, M] ->
    per_head = lambda x: jnp.repeat(x.astype(jnp.float32).reshape(K, G), M, axis=1)[None]
    q_position, last_seen = per_query(position), per_query(reach)  # [C, 1, G*M]

    def read(numbers, scales, block):  # [C, K, S, H] float32
        ids = jax.lax.dynamic_slice(page_table, (0, block * pages_a_block), (C, pages_a_block))
        return _read_block(numbers, scales, ids)

    def block_step(block, carry):
        top, total, acc = carry  # [C, K, G*M], the same, [C, K, G*M, value_dim]
        s = pages.part.positions(block * S + jnp.arange(S), B)
        k = read(stored.k, stored.k_scales, block)
        z = jnp.einsum("ckqh,cksh->ckqs", q, k)
        if variant.soft_cap is not None:
            z = variant.soft_cap * jnp.tanh(z / variant.soft_cap)
        if variant.alibi_slopes is not None:
            distance = (s - q_position[..., None]).astype(jnp.float32)
            z = z + per_head(variant.alibi_slopes)[..., None] * distance
        is_seen = s <= last_seen[..., None]  # [C, 1, G*M, S]
        if variant.window is not None:
            is_seen &= s > q_position[..., None] - variant.window
        z = jnp.where(is_seen, z, MASKED)
        new_top = jnp.maximum(top, z.max(axis=-1))
        weight = jnp.where(is_seen, jnp.exp(z - new_top[..., None]), 0)
        fade = jnp.exp(top - new_top)
        # A weight of 0 times a NaN in a slot that was never written would be NaN.
        is_written = (s <= reach.max(axis=1)[:, None])[:, None, :, None]
        latent = k[..., : pages.value_dim]
        v = latent if stored.v is None else read(stored.v, stored.v_scales, block)
        v = jnp.where(is_written, v, 0)
        acc = acc * fade[..., None] + jnp.einsum("ckqs,cksh->ckqh", weight, v)
        return new_top, total * fade + weight.sum(axis=-1), acc

    sinks = None if variant.sinks is None else per_head(variant.sinks)
    carry = _nothing_seen((C, K, G * M), pages.value_dim, sinks)
    num_keys = lambda last: pages.part.num_keys(last, B)
    blocks = _blocks(position, reach, num_keys, S, variant.window)
    top, total, acc = jax.lax.fori_loop(*blocks, block_step, carry)
    by_token = lambda x: jnp.moveaxis(x.reshape(C, K, G, M, *x.shape[3:]), 3, 1)
    out, lse = map(by_token, _divided(top, total, acc))
    return out.reshape(C, M, N, -1), lse.reshape(C, M, N)


def _nothing_seen(shape, value_dim, sinks):
    """Return the running softmax before the first block: largest score, sum of weights, sum of
    values."""
    if sinks is not None:
        top = jnp.broadcast_to(sinks, shape)
        total = jnp.ones_like(top)
    else:
        top = jnp.full(shape, MASKED, jnp.float32)
        total = jnp.zeros_like(top)
    return top, total, jnp.zeros((*shape, value_dim), jnp.float32)


def _read_block(stored, scales, ids):
    """Return the tokens of each tile's pages `ids` [C, pages], in float32: [C, K, S, H]."""
    C, num_pages = ids.shape
    ids = ids[:, 0] if num_pages == 1 else ids
    x = dequantized(stored[ids], None if scales is None else scales[ids])
    if num_pages > 1:
        x = jnp.moveaxis(x, 1, 2).reshape(C, x.shape[2], -1, x.shape[4])
    return x.astype(jnp.float32)


def _divided(top, total, acc):
    """Return the softmax's result and the logarithm of its sums; zeros and -inf where nothing is
    seen."""
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(total))


def _blocks(position, reach, num_keys, block_len, window):
    """Return the first block that one of the queries sees, and the block after the last."""
    last = reach.max()
    behind = -(-num_keys(last) // block_len)
    if window is None:
        return 0, behind
    oldest = jnp.where(position < 0, position.max(), position).min()
    return num_keys(oldest - window) // block_len, behind
