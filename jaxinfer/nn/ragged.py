"""The ragged batch: the rows and tokens of one step, as a model's layers use them.

A step runs R rows (requests) of one or more tokens each, laid one after another in T tokens. The
host sends the rows (`StepRows`); the fields of tokens follow from them (`ragged_batch`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxinfer.sharding.rules import ONE_DEVICE, Layout
from jaxinfer.sharding.sequence import SequenceRows, has_cached, local_page_part, locate_tokens
from jaxinfer.sharding.zigzag import TokenSplit


class CacheShape(NamedTuple):
    """What a model stores of a token: one key and one value of `head_dim` numbers for each KV head
    and layer. With `value_dim` it stores a key alone, whose first `value_dim` numbers are the
    value (multi-head latent attention)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None


class StepRows(NamedTuple):
    """The rows of a step. Padding rows are empty (`kv_len` 0) and come last."""

    q_start: Int[Array, " R1"]  # row r has the tokens [q_start[r], q_start[r + 1])
    kv_len: Int[Array, " R"]  # cached tokens of the row, this step's included
    page_table: Int[Array, "R W"]
    write_from: Int[Array, " R"]  # positions before it are in shared pages already
    min_rope_len: Int[Array, " R"]  # the least sequence length that RoPE scalings use


class RaggedBatch(NamedTuple):
    """R rows of one or more tokens each, laid one after another in T tokens.

    Padding tokens come after `q_start[R]`; padding rows are empty (`kv_len` 0). Where the layout
    splits sequences (`sharding/zigzag.py`), the fields of tokens are one device's, and the fields
    of rows are whole.
    """

    positions: Int[Array, " T"]
    rope_len: Int[Array, " T"]  # the sequence length that RoPE scalings use (nn/rope.py)
    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]  # cached tokens of the row, this step's included
    page_table: Int[Array, "R W"]
    write_page: Int[Array, " T"]  # P or more: the token's keys and values are not stored here
    write_offset: Int[Array, " T"]  # within the device's part of the page
    write_from: Int[Array, " R"]  # positions before it are in shared pages already
    has_cached: Bool[Array, ""]  # whether a row had tokens before this step
    split: TokenSplit  # which of the step's tokens these are

    @property
    def rows(self) -> SequenceRows:
        return SequenceRows(*(getattr(self, name) for name in SequenceRows._fields))


def ragged_batch(
    rows: StepRows,
    num_tokens: int,
    *,
    page_size: int,
    num_pages: int,
    layout: Layout = ONE_DEVICE,
) -> RaggedBatch:
    """Derive the fields of tokens.

    Tokens before position `write_from` of their row are not written: a shared page holds their keys
    and values already. With a `layout` that splits sequences this is one device's batch, to be
    called inside `shard_map`, and `page_size` counts the tokens of a page that the device stores.
    """
    q_start, kv_len, page_table, write_from, min_rope_len = rows
    split_rows = SequenceRows(
        q_start, kv_len, page_table, write_from, has_cached(q_start, kv_len, layout)
    )
    part = local_page_part(layout)
    split = TokenSplit.of(layout, num_tokens)
    at = locate_tokens(split.indices(), split_rows, part, part_size=page_size, num_pages=num_pages)
    return RaggedBatch(
        positions=at.position,
        rope_len=jnp.maximum(min_rope_len[at.row], at.position + 1),
        write_page=at.page,
        write_offset=at.offset,
        split=split,
        **split_rows._asdict(),
    )
