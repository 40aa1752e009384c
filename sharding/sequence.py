"""A layer's attention where every sequence is split over the devices of a mesh axis.

Of each page a device holds some cells (`kernels/paged_attention/page_part.py`), so that pages,
tables and whoever deals them out know nothing of it. Of a step's tokens it has some, or all if they
are few (`zigzag.py`):

    all: stores those of its cells, attends to its cells, and the devices' results are merged by
         their log-sum-exp. Decodes.
    some: the ring (`ring.py`) for keys that are new in this step, each device storing what comes by
         of its cells; then its queries go round the devices, to meet what was cached before.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.dispatch import sibling_in
from jaxinfer.kernels.folding import fold_of
from jaxinfer.kernels.kv_pages import KVPages, NewTokens, StoredTokens, as_stored, dequantized
from jaxinfer.kernels.paged_attention import RaggedRows, paged_attention
from jaxinfer.kernels.paged_attention.api import rows_at
from jaxinfer.kernels.paged_attention.page_part import WHOLE, PagePart
from jaxinfer.kernels.rope_and_write import BACKENDS, rope_and_write
from jaxinfer.kernels.rotary import Rotary, rotate
from jaxinfer.sharding.collectives import Axes, all_max, all_sum, rank
from jaxinfer.sharding.ring import Keep, Partial, around, merged, ring_attention
from jaxinfer.sharding.rules import Layout
from jaxinfer.sharding.zigzag import TokenSplit


class Rows(NamedTuple):
    """Those of a step, whole on every device."""

    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]
    page_table: Int[Array, "R W"]
    write_from: Int[Array, " R"]  # positions before it are in shared pages already
    has_cached: Bool[Array, ""]  # whether any row of any device's step had tokens before it


class PartedRows(NamedTuple):
    """The rows of a step whose tokens and pages are split over devices, and how they are."""

    rows: Rows
    split: TokenSplit
    layout: Layout


class Places(NamedTuple):
    """Of tokens, on one device."""

    row: Int[Array, " T"]  # 0 of no row
    position: Int[Array, " T"]  # 0 of no row
    page: Int[Array, " T"]  # P or more: its cell is not here, or holds it already
    cell: Int[Array, " T"]  # of the device's part of a page


def has_cached(q_start: Int[Array, " R1"], kv_len: Int[Array, " R"], layout: Layout):
    """Whether any row has tokens from before the step, of those that any stage works on."""
    any_here = (kv_len > jnp.diff(q_start)).any()
    stages = layout.axes("stage") if layout.axes("page_offset") else ()
    return all_max(any_here.astype(jnp.int32), stages) > 0


def part_of_pages(layout: Layout) -> PagePart:
    """Which cells of every page this device holds."""
    axes = layout.axes("page_offset")
    return PagePart(rank(axes), layout.parts("page_offset")) if axes else WHOLE


def places(
    index: Int[Array, " T"], rows: Rows, part: PagePart, *, cells: int, num_pages: int
) -> Places:
    """Of tokens `index` of the step, where this device holds `part` of each page, `cells` in it."""
    row = rows_at(index, rows.q_start)
    is_real = row < rows.kv_len.shape[0]
    row = jnp.where(is_real, row, 0)
    offset = index - rows.q_start[row + 1]  # negative: from the row's end
    position = jnp.where(is_real, rows.kv_len[row] + offset, 0)
    is_written = is_real & (position >= rows.write_from[row]) & part.holds(position, cells)
    page = rows.page_table[row, position // (cells * part.count)]
    return Places(row, position, jnp.where(is_written, page, num_pages), position % cells)


def attend_to_parts(
    q: Float[Array, "T N H"],
    new: NewTokens,
    parts: PartedRows,
    pages: KVPages,
    variant: AttentionVariant,
    *,
    rotary: Rotary | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "T N values"], KVPages]:
    """Do what `update_and_attend` does (`kernels/paged_attention/update.py`) for the tokens that
    `parts.split` gives this device, over pages of which each device has a part of the offsets;
    inside `shard_map`. `new.page` and `new.offset` are those of `places`.
    """
    sinks, variant = variant.sinks, dataclasses.replace(variant, sinks=None)
    if parts.split.count == 1:
        q, pages = _write(q, new, rotary, pages, backend)
        part = part_of_pages(parts.layout)
        rows = RaggedRows(parts.rows.q_start, parts.rows.kv_len, parts.rows.page_table)
        found: Any = paged_attention(
            q, rows, pages, variant, part=part, return_lse=True, backend=backend
        )
        out, lse = merged_over(*found, parts.layout.axes("page_offset"))
    else:
        if rotary is not None:
            q, new = rotate(q, *rotary), new._replace(k=rotate(new.k, *rotary))
        (out, lse), pages = _round_the_ring(q, new, parts, pages, variant, backend)
    if sinks is not None:  # one more score, without a value, once for all parts
        out = out * jax.nn.sigmoid(lse - sinks)[..., None]
    return out.astype(q.dtype), pages


def _write(q, new: NewTokens, rotary: Rotary | None, pages: KVPages, backend: str | None):
    writer = sibling_in(BACKENDS, backend)
    return rope_and_write(q, new, rotary, pages, backend=writer)


def merged_over(out: jax.Array, lse: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys of all devices from that over each one's; float32."""
    top = all_max(lse, axes)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight = jnp.exp(lse - top)
    out = all_sum(out.astype(jnp.float32) * weight[..., None], axes)
    total = all_sum(weight, axes)
    return out / jnp.where(total == 0, 1, total)[..., None], jnp.log(total) + top


def _round_the_ring(
    q, new: NewTokens, parts: PartedRows, pages: KVPages, variant: AttentionVariant,
    backend: str | None,
):  # fmt: skip
    rows, split, _ = parts
    part = part_of_pages(parts.layout)
    num_pages = pages.k.shape[0]
    cells = pages.k.shape[2] * fold_of(pages.k.shape[3], q.shape[2])
    value_dim = variant.value_dim or q.shape[2]

    def store(pages, chunk: StoredTokens, device):
        at = places(split.indices(device), rows, part, cells=cells, num_pages=num_pages)
        k = dequantized(chunk.k, chunk.k_scales)
        v = None if chunk.v is None else dequantized(chunk.v, chunk.v_scales)
        # By the platform's own writer: a scatter makes XLA copy the pool (v5e, jax 0.10.2). It has
        # no queries to rotate here, and gets something small for them.
        return _write(k[:, :1], NewTokens(k, v, at.page, at.cell), None, pages, backend)[1]

    stored = as_stored(pages, new.k, new.v)
    keep = Keep(store, pages)
    found, pages = ring_attention(q, stored, rows.q_start, split, keep, variant, backend=backend)

    def to_pages(q, device) -> Partial:
        visiting = rows_of_blocks(rows, split, device)
        answer: Any = paged_attention(
            q, visiting, pages, variant, part=part, return_lse=True, backend=backend
        )
        blocks = lambda x: x.reshape(2, split.block_len, *x.shape[1:]).astype(jnp.float32)
        return Partial(*map(blocks, answer))

    def with_cached(found: Partial) -> Partial:
        return merged(found, around(q, split, value_dim, to_pages))

    # All devices of the mesh go one way, or some would wait for ever: a ring is passed on by all.
    out, lse = lax.cond(rows.has_cached, with_cached, lambda found: found, found)
    return (out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2])), pages


def rows_of_blocks(rows: Rows, split: TokenSplit, device: jax.Array) -> RaggedRows:
    """Return a device's tokens as 2R rows, those of its early block and then those of its late one,
    whose keys end at the length that was cached before the step."""
    starts = split.starts(device)[:, None]  # [2, 1]
    edges = jnp.clip(rows.q_start, starts, starts + split.block_len)  # [2, R + 1]
    within = edges - starts
    # Tokens of no row come last: where the early block has any, the late one has no others.
    q_start = jnp.concatenate([within[0, :-1], within[0, -1] + within[1]])
    kv_len = rows.kv_len - (rows.q_start[1:] - edges[:, 1:])
    kv_len = jnp.where(jnp.diff(edges) > 0, kv_len, 0).reshape(-1)
    cached = jnp.tile(rows.kv_len - jnp.diff(rows.q_start), 2)
    return RaggedRows(q_start, kv_len, jnp.tile(rows.page_table, (2, 1)), cached)
