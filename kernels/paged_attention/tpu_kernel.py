"""The body of the TPU kernel: one flat walk over all blocks of all query tiles.

The work of a call is a list of *items*, each a run of query tokens of one row, in token order. An
item walks the *blocks* (of `pages_a_block` pages) that its queries can see. The loop goes over all
blocks of all items as if they were one sequence, so that the pipeline never drains between rows:

    ids of block i + slots  ->  pages of block i + slots - 1  ->  arithmetic of block i
       (HBM -> SMEM)               (HBM -> VMEM)                    (online softmax)

An item of one token (a decode) works on `group` rows a KV head; a longer one on `group * M`.

Fold: a page may hold `fold` tokens in one row of lanes (`folding.py`). Each query then has
`fold` copies, copy j with its numbers in lanes [j * H, (j + 1) * H) and zeros elsewhere, so that
copy j attends to the tokens of parity j alone; the copies' softmaxes are merged at the end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from jaxinfer.kernels.paged_attention.tpu_plan import (
    BLOCK,
    END_BLOCK,
    IDS,
    ROW,
    TOKEN_RUN,
    TpuItem,
    TpuPagedPlan,
    TpuRefs,
    guard,
    page_range,
    tile_start,
)
from jaxinfer.kernels.paged_attention.tpu_softmax import (
    attend,
    clear_unread,
    load_queries,
    rows_of,
    store_result,
)
from jaxinfer.kernels.paged_attention.tpu_update import (
    end_of_old_pages,
    merge_edge,
    new_copies,
    start_groups,
    wait_edge,
    wait_groups,
)


def kernel(plan: TpuPagedPlan, *refs) -> None:
    """Entry point: `refs` as in `TpuRefs`, without those that the plan lacks."""
    present = iter(refs)
    r = TpuRefs(*(None if name in plan.absent else next(present) for name in TpuRefs._fields))
    if plan.is_update:
        r = r._replace(k_pages=r.k_stored, v_pages=r.v_stored)
    core = pl.program_id(0)
    first, num_steps = r.core_first[core], r.core_steps[core]
    start = (first, _field(plan, r, BLOCK, first))
    if r.slopes is not None:
        for k in range(plan.num_kv_heads):
            r.row_slopes[k] = rows_of(r.slopes[k], plan.tile)

    def iteration(i, cursors):
        """Run each stage on its own block; the first iterations fill the pipeline."""
        ids, pages, here = cursors
        _stage(i + plan.slots, num_steps, partial(_start_ids, plan, r, at=ids))
        _stage(i + plan.slots - 1, num_steps, partial(_start_pages, plan, r, at=pages))
        _stage(i, num_steps, partial(_work, plan, r, at=here, first_item=first))
        pages = _advance(plan, r, pages, i + plan.slots - 1 >= 0)
        return _advance(plan, r, ids), pages, _advance(plan, r, here, i >= 0)

    first_iteration = jnp.where(num_steps > 0, -plan.slots, 0)
    *_, (end, _) = jax.lax.fori_loop(first_iteration, num_steps, iteration, (start, start, start))

    def wait(index, _):
        _wait_out(plan, r, index)
        if plan.is_update:
            wait_edge(plan, r, _item(plan, r, index))

    jax.lax.fori_loop(jnp.maximum(first, end - 2), end, wait, None)


def _stage(step, num_steps, action) -> None:
    guard((step >= 0) & (step < num_steps), lambda: action(step))


def _field(plan: TpuPagedPlan, r: TpuRefs, field: int, index):
    return r.items[field * plan.num_items + index]


def _item(plan: TpuPagedPlan, r: TpuRefs, index) -> TpuItem:
    return TpuItem(index, *(_field(plan, r, field, index) for field in range(plan.num_fields)))


def _advance(plan: TpuPagedPlan, r: TpuRefs, at, is_moving: Any = True):
    """Return the block after (item, block), perhaps the next item's first. The list ends in an
    empty item, where a cursor stays."""
    index, block = at
    is_over = block + 1 >= _field(plan, r, END_BLOCK, index)
    following = jnp.minimum(index + 1, plan.num_items - 1)
    next_block = jnp.where(is_over, _field(plan, r, BLOCK, following), block + 1)
    following = jnp.where(is_over, following, index)
    return jnp.where(is_moving, following, index), jnp.where(is_moving, next_block, block)


def _ids_copy(plan: TpuPagedPlan, r: TpuRefs, step, at):
    index, block = at
    row = _field(plan, r, ROW, index)
    part = row * plan.ids_a_row + div(block * plan.pages_a_block, IDS)
    slot = rem(step, 2)
    return pltpu.make_async_copy(r.table.at[part], r.ids.at[slot], r.ids_sem.at[slot])


def _start_ids(plan: TpuPagedPlan, r: TpuRefs, step, *, at) -> None:
    _ids_copy(plan, r, step, at).start()


def _page_copies(plan: TpuPagedPlan, r: TpuRefs, slot, block, page, page_id):
    """Return the copies of a page's keys, values and scales."""
    within = page - block * plan.pages_a_block
    page_rows = pl.ds(pl.multiple_of(within * plan.page_rows, plan.page_rows), plan.page_rows)
    pairs = [(r.k_pages, r.k.at[slot, :, page_rows]), (r.v_pages, r.v.at[slot, :, page_rows])]
    if plan.has_scales:
        pairs += [(r.k_scales, r.k_factors.at[slot, within])]
        pairs += [(r.v_scales, r.v_factors.at[slot, within])]
    return [
        pltpu.make_async_copy(source.at[page_id], target, r.kv_sem.at[slot])
        for source, target in pairs
    ]


def _block_copies(
    plan: TpuPagedPlan, r: TpuRefs, slot, item: TpuItem, block, id_of, action
) -> None:
    """Call `action` on all copies that bring a block; to wait, any page id will do."""
    first, end = page_range(plan, item, block)

    def fetch(page, _):
        for copy in _page_copies(plan, r, slot, block, page, id_of(page)):
            action(copy)

    if plan.is_update:
        new_copies(plan, r, slot, item, block, id_of, action)
        end = jnp.minimum(end, end_of_old_pages(plan, item))
    jax.lax.fori_loop(first, end, fetch, None)


def _start_pages(plan: TpuPagedPlan, r: TpuRefs, step, *, at) -> None:
    """Fetch a block's pages, and with an item's first block its queries."""
    index, block = at
    item = _item(plan, r, index)
    _ids_copy(plan, r, step, at).wait()
    id_of = lambda page: r.ids[rem(step, 2), 0, rem(page, IDS)]
    slot = rem(step, plan.slots)
    _block_copies(plan, r, slot, item, block, id_of, lambda copy: copy.start())
    if plan.is_update:
        start_groups(plan, r, item, block, id_of)
    guard(block == item.block, lambda: _queries(plan, r, item, lambda copy: copy.start()))


def _queries(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, action) -> None:
    """Call `action` on the copy of the item's queries: one token, or M of them."""
    slot = rem(item.index, plan.slots)
    sem = r.q_sem.at[slot]

    def one():
        action(pltpu.make_async_copy(r.q.at[item.first], r.q_tile.at[slot, 0], sem))

    def many():
        tokens = pl.ds(tile_start(plan, r, item), plan.tile)
        action(pltpu.make_async_copy(r.q.at[tokens], r.q_tile.at[slot], sem))

    guard(item.count == 1, one)
    if plan.tile > 1:
        guard(item.count > 1, many)


def _out_copies(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, action) -> None:
    """Call `action` on the copies of the item's result: its tokens alone, in runs, then one by
    one."""
    slot = rem(item.index, 2)
    shift = jnp.where(item.count == 1, 0, item.first - tile_start(plan, r, item))
    num_runs = div(item.count, TOKEN_RUN)

    def copy(done, size):
        pairs = [(r.out_tile, r.out), *([(r.lse_tile, r.lse)] if plan.has_lse else [])]
        for tile, out in pairs:
            source = tile.at[slot, pl.ds(shift + done, size)]
            target = out.at[pl.ds(item.first + done, size)]
            action(pltpu.make_async_copy(source, target, r.out_sem.at[slot]))

    if plan.tile >= TOKEN_RUN:
        jax.lax.fori_loop(0, num_runs, lambda i, _: copy(i * TOKEN_RUN, TOKEN_RUN), None)
    jax.lax.fori_loop(num_runs * TOKEN_RUN, item.count, lambda i, _: copy(i, 1), None)


def _wait_out(plan: TpuPagedPlan, r: TpuRefs, index) -> None:
    _out_copies(plan, r, _item(plan, r, index), lambda copy: copy.wait())


def _work(plan: TpuPagedPlan, r: TpuRefs, step, *, at, first_item) -> None:
    """Compute one block of one item; load its queries at the first, store its result at the
    last."""
    index, block = at
    item = _item(plan, r, index)
    slot = rem(step, plan.slots)

    def begin():
        if plan.is_update:  # item `index - 2` used the same buffer for its edge
            guard(index - 2 >= first_item, lambda: wait_edge(plan, r, _item(plan, r, index - 2)))
        _queries(plan, r, item, lambda copy: copy.wait())
        for_rows(load_queries)

    def finish():
        guard(index - 2 >= first_item, lambda: _wait_out(plan, r, index - 2))
        for_rows(store_result)
        if plan.is_update:
            wait_groups(plan, r, item)
        _out_copies(plan, r, item, lambda copy: copy.start())

    def for_rows(action):
        guard(item.count == 1, lambda: action(plan, r, item, 1))
        if plan.tile > 1:
            guard(item.count > 1, lambda: action(plan, r, item, plan.tile))

    guard(block == item.block, begin)
    _block_copies(plan, r, slot, item, block, lambda page: 0, lambda copy: copy.wait())
    clear_unread(plan, r, slot, item, block)
    if plan.is_update:
        merge_edge(plan, r, slot, item, block)
    for_rows(lambda plan, r, item, tokens: attend(plan, r, slot, item, block, tokens))
    guard(block + 1 == item.end_block, finish)
