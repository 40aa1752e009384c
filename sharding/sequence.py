"""Attention with every sequence split over the devices of a mesh axis (sequence parallelism).

A device stores some of the offsets of every page (`kernels/paged_attention/page_part.py`), so page
tables and allocation do not depend on the split. It has some of the step's tokens, or all of them
if they are few (`zigzag.py`):

    all    each device stores the tokens of its offsets and attends to its offsets; the results are
           merged by their log-sum-exp. Used for decode steps.
    some   a ring (`ring.py`) for the keys of this step, from which each device stores the tokens of
           its offsets; then the queries travel round the devices and attend to the cached keys.
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
from jaxinfer.sharding.ring import (
    ChunkStore,
    PartialAttention,
    merge_partials,
    query_ring_attention,
    ring_attention,
)
from jaxinfer.sharding.rules import Layout
from jaxinfer.sharding.zigzag import TokenSplit


class SequenceRows(NamedTuple):
    """The rows of a step, the same on every device."""

    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]
    page_table: Int[Array, "R W"]
    write_from: Int[Array, " R"]  # earlier positions are in shared pages already
    has_cached: Bool[Array, ""]  # whether any row of any device had tokens before this step


class SplitRows(NamedTuple):
    """The rows of a step, and how their tokens and pages are split over devices."""

    rows: SequenceRows
    split: TokenSplit
    layout: Layout


class TokenLocations(NamedTuple):
    """The row, position and page slot of tokens, on one device; row and position are 0 for padding.

    A page number of P or more means that this device does not store the token: its offset is on
    another device, or the token is in a shared page already.
    """

    row: Int[Array, " T"]
    position: Int[Array, " T"]
    page: Int[Array, " T"]
    offset: Int[Array, " T"]  # within the device's part of the page


def has_cached(
    q_start: Int[Array, " R1"], kv_len: Int[Array, " R"], layout: Layout
) -> Bool[Array, ""]:
    """Return whether any row, of any pipeline stage's batch, has tokens from before the step."""
    any_here = (kv_len > jnp.diff(q_start)).any()
    stages = layout.axes("stage") if layout.axes("page_offset") else ()
    return all_max(any_here.astype(jnp.int32), stages) > 0


def local_page_part(layout: Layout) -> PagePart:
    """Return the offsets of every page that this device stores."""
    axes = layout.axes("page_offset")
    return PagePart(rank(axes), layout.parts("page_offset")) if axes else WHOLE


def locate_tokens(
    index: Int[Array, " T"], rows: SequenceRows, part: PagePart, *, part_size: int, num_pages: int
) -> TokenLocations:
    """Locate the tokens `index` of the step on a device that stores `part` of every page.

    The part has `part_size` offsets.
    """
    row = rows_at(index, rows.q_start)
    is_real = row < rows.kv_len.shape[0]
    row = jnp.where(is_real, row, 0)
    from_end = index - rows.q_start[row + 1]  # negative
    position = jnp.where(is_real, rows.kv_len[row] + from_end, 0)
    is_written = is_real & (position >= rows.write_from[row]) & part.holds(position, part_size)
    page = rows.page_table[row, position // (part_size * part.count)]
    page = jnp.where(is_written, page, num_pages)
    return TokenLocations(row, position, page, position % part_size)


def sequence_attention(
    q: Float[Array, "T N H"],
    new: NewTokens,
    step: SplitRows,
    pages: KVPages,
    variant: AttentionVariant,
    *,
    rotary: Rotary | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "T N values"], KVPages]:
    """Do what `update_and_attend` does (`kernels/paged_attention/update.py`), inside `shard_map`.

    The tokens are those that `step.split` gives this device, and each device stores a part of the
    offsets of every page. `new.page` and `new.offset` come from `locate_tokens`.
    """
    sinks, variant = variant.sinks, dataclasses.replace(variant, sinks=None)
    if step.split.count == 1:
        q, pages = _write(q, new, rotary, pages, backend)
        part = local_page_part(step.layout)
        rows = RaggedRows(step.rows.q_start, step.rows.kv_len, step.rows.page_table)
        result: Any = paged_attention(
            q, rows, pages, variant, part=part, return_lse=True, backend=backend
        )
        out, lse = merge_over_devices(result[0], result[1], step.layout.axes("page_offset"))
    else:
        if rotary is not None:
            q, new = rotate(q, *rotary), new._replace(k=rotate(new.k, *rotary))
        (out, lse), pages = _ring_and_pages(q, new, step, pages, variant, backend)
    if sinks is not None:  # a score without a value, counted once for all devices
        out = out * jax.nn.sigmoid(lse - sinks)[..., None]
    return out.astype(q.dtype), pages


def _write(q, new: NewTokens, rotary: Rotary | None, pages: KVPages, backend: str | None):
    writer = sibling_in(BACKENDS, backend)
    return rope_and_write(q, new, rotary, pages, backend=writer)


def merge_over_devices(
    out: Float[Array, "T N values"], lse: Float[Array, "T N"], axes: Axes
) -> tuple[Float[Array, "T N values"], Float[Array, "T N"]]:
    """Return the attention to the keys of all devices from that to each device's; float32."""
    largest = all_max(lse, axes)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weight = jnp.exp(lse - largest)
    out = all_sum(out.astype(jnp.float32) * weight[..., None], axes)
    total = all_sum(weight, axes)
    return out / jnp.where(total == 0, 1, total)[..., None], jnp.log(total) + largest


def _ring_and_pages(
    q, new: NewTokens, step: SplitRows, pages: KVPages, variant: AttentionVariant,
    backend: str | None,
):  # fmt: skip
    """Attend to the keys of this step by a ring, and to cached keys by a ring of queries."""
    rows, split, _ = step
    part = local_page_part(step.layout)
    num_pages = pages.k.shape[0]
    part_size = pages.k.shape[2] * fold_of(pages.k.shape[3], q.shape[2])
    value_dim = variant.value_dim or q.shape[2]

    def store(pages, chunk: StoredTokens, device):
        index = split.indices(device)
        at = locate_tokens(index, rows, part, part_size=part_size, num_pages=num_pages)
        k = dequantized(chunk.k, chunk.k_scales)
        v = None if chunk.v is None else dequantized(chunk.v, chunk.v_scales)
        # Use the platform's own writer: a scatter makes XLA copy the pool (v5e, jax 0.10.2). The
        # writer rotates queries, of which there are none here, so it gets a small dummy.
        return _write(k[:, :1], NewTokens(k, v, at.page, at.offset), None, pages, backend)[1]

    stored = as_stored(pages, new.k, new.v)
    chunks = ChunkStore(store, pages)
    total, pages = ring_attention(q, stored, rows.q_start, split, chunks, variant, backend=backend)

    def attend_to_pages(q, device) -> PartialAttention:
        visiting = rows_of_blocks(rows, split, device)
        result: Any = paged_attention(
            q, visiting, pages, variant, part=part, return_lse=True, backend=backend
        )
        blocks = lambda x: x.reshape(2, split.block_len, *x.shape[1:]).astype(jnp.float32)
        return PartialAttention(*map(blocks, result))

    def with_cached(total: PartialAttention) -> PartialAttention:
        return merge_partials(total, query_ring_attention(q, split, value_dim, attend_to_pages))

    # The predicate is the same on all devices of the mesh; otherwise the ring would deadlock.
    out, lse = lax.cond(rows.has_cached, with_cached, lambda total: total, total)
    return (out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2])), pages


def rows_of_blocks(rows: SequenceRows, split: TokenSplit, device: jax.Array) -> RaggedRows:
    """Return a device's tokens as 2R rows: those of its early block, then those of its late block.

    Their keys end at the length that was cached before the step.
    """
    starts = split.starts(device)[:, None]  # [2, 1]
    edges = jnp.clip(rows.q_start, starts, starts + split.block_len)  # [2, R + 1]
    within = edges - starts
    # Padding comes last: if the early block has any, the late block has nothing else.
    q_start = jnp.concatenate([within[0, :-1], within[0, -1] + within[1]])
    kv_len = rows.kv_len - (rows.q_start[1:] - edges[:, 1:])
    kv_len = jnp.where(jnp.diff(edges) > 0, kv_len, 0).reshape(-1)
    cached = jnp.tile(rows.kv_len - jnp.diff(rows.q_start), 2)
    return RaggedRows(q_start, kv_len, jnp.tile(rows.page_table, (2, 1)), cached)
