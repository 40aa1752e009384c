"""What XLA prepares for the TPU kernel: the work list, the queries, the step's new tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxinfer.kernels.folding import LANES
from jaxinfer.kernels.paged_attention.rows import RaggedRows
from jaxinfer.kernels.paged_attention.tpu_plan import TpuPagedPlan


class StoreRanges(NamedTuple):
    """Where the tokens that a step stores begin in each row, and the row's groups."""

    start: jax.Array  # [R]: a position; kv_len where nothing is stored
    group: jax.Array  # [R]: the row's first group
    end_group: jax.Array  # [R]: the one behind its last
    edge_page: jax.Array  # [R]: the page that holds position `start`


def store_ranges(plan: TpuPagedPlan, rows: RaggedRows, write_page, num_pages: int) -> StoreRanges:
    """Return where the new tokens of each row are; tokens that are not stored come first."""
    is_left_out = (write_page >= num_pages).astype(jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_left_out)])
    num_left_out = jnp.diff(before[rows.q_start])
    start = rows.kv_len - jnp.diff(rows.q_start) + num_left_out
    E = plan.group_len
    num_groups = jnp.where(start < rows.kv_len, pl.cdiv(rows.kv_len, E) - start // E, 0)
    ends = jnp.cumsum(num_groups)
    R, W = rows.page_table.shape
    page = jnp.clip(start // plan.page_size, 0, W - 1)
    edge_page = rows.page_table.reshape(-1)[jnp.arange(R, dtype=jnp.int32) * W + page]
    return StoreRanges(start, ends - num_groups, ends, edge_page)


def groups_of(plan: TpuPagedPlan, rows: RaggedRows, new: StoreRanges, values, pages):
    """[T, K, H] -> [groups, K, A, L], laid out as in pages; zero where there is no new token."""
    T, K, H = values.shape
    E, lanes = plan.group_len, pages.shape[3]
    R = rows.kv_len.shape[0]
    num_groups = min(T, T // E + 2 * R)
    group = jnp.arange(num_groups, dtype=jnp.int32)
    row = jnp.searchsorted(new.end_group, group, side="right", method="compare_all")
    row = jnp.minimum(row, R - 1).astype(jnp.int32)
    start, first_group, length, end = _take_rows(
        (new.start, new.group, rows.kv_len, rows.q_start[1:]), row[:, None]
    )
    first = (start // E + group[:, None] - first_group) * E
    position = first + jnp.arange(E, dtype=jnp.int32)  # [groups, E]
    is_new = (position >= start) & (position < length)
    token = end - (length - position)
    tokens = values.astype(pages.dtype).at[token].get(mode="clip")  # [groups, E, K, H]
    tokens = jnp.where(is_new[..., None, None], tokens, 0)
    tokens = tokens.reshape(num_groups, plan.group_rows, plan.fold, K, H)
    tokens = jnp.moveaxis(tokens, 3, 1).reshape(num_groups, K, plan.group_rows, plan.fold * H)
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, 0), (0, lanes - plan.fold * H)))


def work_list(plan: TpuPagedPlan, rows: RaggedRows, cores: int, new: StoreRanges | None = None):
    """Return the items [num_fields * I], an empty one last, and each core's first item and number
    of blocks. A core gets a run of items whose blocks are about its share of all."""
    q_start, kv_len = rows.q_start, rows.kv_len
    R, S = kv_len.shape[0], plan.block_len
    tiles = pl.cdiv(jnp.diff(q_start), plan.tile)
    ends = jnp.cumsum(tiles)
    index = jnp.arange(plan.num_items, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    is_item, row = row < R, jnp.minimum(row, R - 1)
    fields = (q_start[:-1], q_start[1:], kv_len, ends - tiles)
    if new is not None:
        fields += (new.start, new.group, new.edge_page)
    start, end, length, first_item, *new_fields = _take_rows(fields, row)
    first = start + (index - first_item) * plan.tile
    count = jnp.minimum(end - first, plan.tile)
    position = length - (end - first)
    oldest = 0 if plan.window is None else jnp.maximum(position - plan.window + 1, 0)
    block = jnp.broadcast_to(oldest // S, index.shape)
    end_block = (position + count - 1) // S + 1
    fields = (row, first, count, position, block, end_block, *new_fields)
    items = [jnp.where(is_item, x, 0).astype(jnp.int32) for x in fields]

    num_blocks = items[5] - items[4]
    steps = jnp.cumsum(num_blocks)  # up to and including each item
    shares = jnp.arange(1, cores, dtype=jnp.int32) * pl.cdiv(steps[-1], cores)
    middles = 2 * steps - num_blocks  # an item goes to the core in whose share its middle lies
    bounds = jnp.searchsorted(middles, 2 * shares, method="compare_all").astype(jnp.int32)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.minimum(bounds, ends[-1]), ends[-1:]])
    steps_before = jnp.concatenate([jnp.zeros(1, jnp.int32), steps])[bounds]
    return jnp.concatenate(items), bounds[:-1], jnp.diff(steps_before)


def _take_rows(fields, row):
    """Return each [R] field at `row` by one gather for all, since each alone is a launch or two."""
    found = jnp.stack(fields, axis=1)[row]
    return [found[..., i] for i in range(len(fields))]


def copies(plan: TpuPagedPlan, q, lanes: int):
    """[T, N, H] -> [T, fold * N, L]: by KV head, copy, head of the group (`tpu_kernel.py`)."""
    T, N, H = q.shape
    q = q.astype(plan.compute).reshape(T, plan.num_kv_heads, plan.group, H)
    in_lanes = lambda j: [(0, 0)] * 3 + [(j * H, lanes - (j + 1) * H)]
    parts = [jnp.pad(q, in_lanes(j)) for j in range(plan.fold)]
    return jnp.stack(parts, axis=2).reshape(T, plan.fold * N, lanes)


def lanes_of_head(plan: TpuPagedPlan, x):
    """[N] -> [K, fold * G, 128], equal in all lanes."""
    x = x.astype(jnp.float32).reshape(plan.num_kv_heads, 1, plan.group, 1)
    shape = (plan.num_kv_heads, plan.fold, plan.group, LANES)
    return jnp.broadcast_to(x, shape).reshape(plan.num_kv_heads, plan.copies, LANES)
