"""Storing the step's new keys and values in the kernel that attends to them.

XLA lays the new tokens of a row out as they will lie in its pages, in *groups* of `group_rows` rows
of lanes, the least that the kernel reads or writes of a page (`tpu_tiling.group_rows`). Where the
row's first new token falls into a page that has older ones, its group is the row's *edge*: merged
with what the page holds. The groups after it are new as a whole (offsets past the row's end are
zeros).

    page   | old | old | old new | new | new + zeros |
                         edge      groups, copied from `k_groups` to the page as they are

An item that sees new tokens takes them from the groups, never from pages, and merges the edge into
its copy of the block. A group is stored by the one item that has the group's first new token among
its own. So items need no order, on one core or on two: an item may read an edge from its page while
another stores it, but the bytes of the old tokens do not change by that, and it takes the new
tokens from the group. Tokens that are not stored come before the new ones: they count as old.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from jaxinfer.kernels.paged_attention.tpu_plan import (
    TpuItem,
    TpuPagedPlan,
    TpuRefs,
    guard,
    page_range,
)


def _has_edge(plan: TpuPagedPlan, item: TpuItem):
    """Return whether the item sees new tokens, the first of them in a page that has older ones."""
    return (rem(item.new, plan.page_size) != 0) & (item.new < item.end)


def _edge_start(plan: TpuPagedPlan, item: TpuItem):
    """Return the position where the group of the row's first new token begins."""
    return div(item.new, plan.group_len) * plan.group_len


def _first_whole(plan: TpuPagedPlan, item: TpuItem):
    """Return the position where the groups that hold no older tokens begin."""
    start = _edge_start(plan, item)
    return jnp.where(rem(item.new, plan.page_size) != 0, start + plan.group_len, start)


def _edge_is_last(plan: TpuPagedPlan, item: TpuItem):
    """Return whether the item sees nothing of the page after the edge (a decode): such a page is
    fetched in one piece."""
    return item.end <= _edge_start(plan, item) + plan.group_len


def end_of_old_pages(plan: TpuPagedPlan, item: TpuItem):
    """Return the page after the last one that is fetched in one piece."""
    is_cut = _has_edge(plan, item) & ~_edge_is_last(plan, item)
    return div(item.new + jnp.where(is_cut, 0, plan.page_size - 1), plan.page_size)


def new_copies(plan: TpuPagedPlan, r: TpuRefs, slot, item: TpuItem, block, id_of, action) -> None:
    """Call `action` on the copies that bring what `end_of_old_pages` leaves out of a block."""
    first, end = page_range(plan, item, block)
    base = block * plan.block_len
    edge_page = div(item.new, plan.page_size)
    has_edge = _has_edge(plan, item) & (edge_page >= first) & (edge_page < end)
    sem = r.kv_sem.at[slot]

    def bring(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            action(pltpu.make_async_copy(source, target, sem))

    def block_rows(position):
        rows = _rows(plan, position - base)
        return r.k.at[slot, :, rows], r.v.at[slot, :, rows]

    def edge():
        group = (r.k_groups.at[item.group], r.v_groups.at[item.group])
        bring(group, (r.k_edge.at[slot], r.v_edge.at[slot]))

    def old_group(i, _):
        page_id, rows = id_of(edge_page), _rows(plan, i * plan.group_len)
        source = (r.k_pages.at[page_id, :, rows], r.v_pages.at[page_id, :, rows])
        bring(source, block_rows(edge_page * plan.page_size + i * plan.group_len))

    def whole_group(i, _):
        bring(_group(plan, r, item, i), block_rows(i * plan.group_len))

    guard(has_edge, edge)
    in_page = rem(_edge_start(plan, item), plan.page_size)
    num_old = div(in_page, plan.group_len) + 1
    is_cut = has_edge & ~_edge_is_last(plan, item)
    jax.lax.fori_loop(0, jnp.where(is_cut, num_old, 0), old_group, None)
    start = jnp.maximum(_first_whole(plan, item), first * plan.page_size)
    stop = jnp.minimum(item.end, end * plan.page_size)
    _for_groups(plan, start, stop, whole_group)


def merge_edge(plan: TpuPagedPlan, r: TpuRefs, slot, item: TpuItem, block) -> None:
    """Put the edge's new tokens into the block, and store the group if this item owns it."""
    first, end = page_range(plan, item, block)
    page = div(item.new, plan.page_size)
    start, write_slot = _edge_start(plan, item), rem(item.index, 2)
    rows = _rows(plan, start - block * plan.block_len)

    def merge():
        shape = (plan.group_rows, r.k.shape[3])
        token = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * plan.fold
        if plan.fold > 1:
            token += div(jax.lax.broadcasted_iota(jnp.int32, shape, 1), plan.head_dim)
        is_new = token >= item.new - start

        def merge_head(h, _):
            parts = ((r.k, r.k_edge, r.k_write), (r.v, r.v_edge, r.v_write))
            for stored, edge, write in parts:
                old, new = (x.astype(jnp.float32) for x in (stored[slot, h, rows], edge[slot, h]))
                merged = jnp.where(is_new, new, old).astype(stored.dtype)
                stored[slot, h, rows] = merged
                write[write_slot, h] = merged

        jax.lax.fori_loop(0, plan.num_kv_heads, merge_head, None)
        _edge_copies(plan, r, item, lambda copy: copy.start())

    guard(_has_edge(plan, item) & (page >= first) & (page < end), merge)


def wait_edge(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem) -> None:
    _edge_copies(plan, r, item, lambda copy: copy.wait())


def _edge_copies(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, action) -> None:
    slot = rem(item.index, 2)
    rows = _rows(plan, rem(_edge_start(plan, item), plan.page_size))

    def copy():
        for write, pages in ((r.k_write, r.k_pages), (r.v_write, r.v_pages)):
            target = pages.at[item.edge_page, :, rows]
            action(pltpu.make_async_copy(write.at[slot], target, r.edge_sem.at[slot]))

    guard(_has_edge(plan, item) & (item.new >= item.position), copy)


def start_groups(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, block, id_of) -> None:
    """Store the groups of a block that are new as a whole and that this item owns."""
    base = block * plan.block_len

    def store(i, _):
        position = i * plan.group_len
        page_id = id_of(div(position, plan.page_size))
        rows = _rows(plan, rem(position, plan.page_size))
        targets = (r.k_pages.at[page_id, :, rows], r.v_pages.at[page_id, :, rows])
        for source, target in zip(_group(plan, r, item, i), targets, strict=True):
            pltpu.make_async_copy(source, target, r.group_sem.at[0]).start()

    first, end = _own_groups(plan, item)
    _for_groups(plan, jnp.maximum(first, base), jnp.minimum(end, base + plan.block_len), store)


def wait_groups(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem) -> None:
    """Wait for all groups that the item stored: their copies are of one size."""

    def wait(i, _):
        for groups in (r.k_groups, r.v_groups):
            pltpu.make_async_copy(groups.at[0], groups.at[0], r.group_sem.at[0]).wait()

    _for_groups(plan, *_own_groups(plan, item), wait)


def _own_groups(plan: TpuPagedPlan, item: TpuItem):
    """Return two positions: this item owns the groups that begin between them."""
    own = div(item.position + plan.group_len - 1, plan.group_len) * plan.group_len
    return jnp.maximum(_first_whole(plan, item), own), item.end


def _for_groups(plan: TpuPagedPlan, start, stop, action) -> None:
    """Call `action(i)` for the groups, counted from position 0, that begin at `start` up to
    `stop`."""
    first = div(start, plan.group_len)
    end = div(stop + plan.group_len - 1, plan.group_len)
    jax.lax.fori_loop(first, jnp.maximum(first, end), action, None)


def _group(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, i):
    """Return the new keys and values of the row's group i, counted from position 0."""
    index = item.group + i - div(item.new, plan.group_len)
    return r.k_groups.at[index], r.v_groups.at[index]


def _rows(plan: TpuPagedPlan, token):
    """Return the rows of lanes of a group that begins at this token of a block or a page."""
    return pl.ds(pl.multiple_of(div(token, plan.fold), plan.group_rows), plan.group_rows)
