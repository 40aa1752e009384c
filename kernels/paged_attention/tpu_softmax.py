"""The arithmetic of the TPU kernel: one item's queries, a block's softmax, the item's result.

A product's rows are one KV head's queries: copy j of head g of token t in row (j * G + g) * M + t.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from jaxinfer.kernels.paged_attention.tpu_plan import (
    MASKED,
    TOKEN_RUN,
    TpuItem,
    TpuPagedPlan,
    TpuRefs,
    guard,
    page_range,
    tile_start,
)


def clear_unread(plan: TpuPagedPlan, r: TpuRefs, slot, item: TpuItem, block) -> None:
    """Zero the values that no query of the item sees: a weight of 0 times a NaN would be NaN.

    Folded keys are zeroed too: in the products of a query's copy its zeros meet the lanes of other
    tokens. Integers are left alone: they are never NaN.
    """
    if jnp.issubdtype(r.v.dtype, jnp.integer):
        return
    blocks = (r.v,) if plan.fold == 1 else (r.v, r.k)
    first, end = page_range(plan, item, block)
    base = block * plan.block_len
    first = first * plan.page_size - base
    end = jnp.minimum(end * plan.page_size, item.position + item.count) - base

    def clear():
        rows, lanes = r.v.shape[2:]
        token = jax.lax.broadcasted_iota(jnp.int32, (rows, lanes), 0) * plan.fold
        if plan.fold > 1:
            token += div(jax.lax.broadcasted_iota(jnp.int32, (rows, lanes), 1), plan.head_dim)
        is_read = (token >= first) & (token < end)

        def clear_head(k, _):
            for block in blocks:
                x = block[slot, k].astype(jnp.float32)
                block[slot, k] = jnp.where(is_read, x, 0).astype(block.dtype)

        jax.lax.fori_loop(0, plan.num_kv_heads, clear_head, None)

    guard((first > 0) | (end < plan.block_len), clear)


def _run(i, start: int = 0):
    return pl.ds(pl.multiple_of(start + i * TOKEN_RUN, TOKEN_RUN), TOKEN_RUN)


def rows_of(x, tokens: int):
    """[Y, 128] -> [Y * tokens, 128]: each row `tokens` times."""
    if tokens == 1:
        return x
    return jnp.concatenate([jnp.broadcast_to(x[i : i + 1], (tokens, 128)) for i in range(len(x))])


def load_queries(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, tokens: int) -> None:
    """Lay the queries of each KV head out as rows of a product (copy, head, token); reset the
    sums."""
    slot = rem(item.index, plan.slots)
    num_rows = plan.copies * tokens
    if tokens == 1:
        q = r.q_tile[slot, 0]  # [X, L]
        for k in range(plan.num_kv_heads):
            r.q_rows[k, : plan.copies] = q[k * plan.copies : (k + 1) * plan.copies]
    else:

        def transpose(i, _):
            q = jnp.swapaxes(r.q_tile[slot, _run(i)], 0, 1)  # [X, TOKEN_RUN, L]
            q = q.reshape(plan.num_kv_heads, plan.copies, *q.shape[1:])
            for y in range(plan.copies):
                r.q_rows[:, _run(i, y * tokens)] = q[:, y]

        jax.lax.fori_loop(0, tokens // TOKEN_RUN, transpose, None)

    def empty(k, _):
        if r.sinks is None:
            r.top[k, :num_rows] = jnp.full((num_rows, 128), MASKED, jnp.float32)
            r.total[k, :num_rows] = jnp.zeros((num_rows, 128), jnp.float32)
        else:  # a sink is one more score, without a value; the first copy has it
            r.top[k, :num_rows] = rows_of(r.sinks[k], tokens)
            row = jax.lax.broadcasted_iota(jnp.int32, (num_rows, 128), 0)
            r.total[k, :num_rows] = jnp.where(row < num_rows // plan.fold, 1.0, 0.0)
        r.acc[k, :num_rows] = jnp.zeros((num_rows, r.acc.shape[2]), jnp.float32)

    jax.lax.fori_loop(0, plan.num_kv_heads, empty, None)


def _positions(
    plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, tokens: int, first_row, num_rows: int
):
    """Return the positions of the queries in these rows of a product, [rows, 1]; -1 for a token of
    another item."""
    if tokens == 1:
        return jnp.full((num_rows, 1), item.position, jnp.int32)
    shift = item.first - tile_start(plan, r, item)
    row = first_row + jax.lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
    offset = rem(row, tokens) - shift
    is_own = (offset >= 0) & (offset < item.count)
    return jnp.where(is_own, item.position + offset, -1)


def attend(plan: TpuPagedPlan, r: TpuRefs, slot, item: TpuItem, block, tokens: int) -> None:
    """Add one block to the running softmax of every row (arXiv:2205.14135), some rows at a time."""
    num_rows = plan.rows_at_once(tokens)

    def attend_rows(i, _):
        first = 0 if tokens == 1 else pl.multiple_of(i * num_rows, TOKEN_RUN)
        rows = pl.ds(first, num_rows)
        position = _positions(plan, r, item, tokens, first, num_rows)
        shape = (num_rows, plan.block_rows)
        s = block * plan.block_len + jax.lax.broadcasted_iota(jnp.int32, shape, 1) * plan.fold
        copy = None
        if plan.fold > 1:
            row = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            copy = div(row, plan.group * tokens)
            s += copy
        is_seen = s <= position
        if plan.window is not None:
            is_seen &= s > position - plan.window

        def attend_head(h, _):
            z = _scores(plan, r, slot, h, rows, copy)
            if r.slopes is not None:
                slopes = r.slopes[h] if tokens == 1 else r.row_slopes[h, rows]
                z += slopes[:, :1] * (s - position).astype(jnp.float32)
            weight = _accumulate(r, h, rows, jnp.where(is_seen, z, MASKED))
            if plan.has_scales:  # scales of unseen tokens may be NaN
                factors = _factors(plan, r.v_factors, slot, h, copy)
                weight = jnp.where(is_seen, weight * factors, 0)
            v = r.v[slot, h].astype(plan.compute)
            r.acc[h, rows] += _dot(weight.astype(plan.compute), v, 0)

        jax.lax.fori_loop(0, plan.num_kv_heads, attend_head, None)

    jax.lax.fori_loop(0, plan.copies * tokens // num_rows, attend_rows, None)


def _factors(plan: TpuPagedPlan, factors, slot, h, copy):
    """Return the scales of head h for the columns of a product: [1 or rows, block_rows]."""

    def factors_of_copy(j: int):
        lanes = slice(j * plan.page_rows, (j + 1) * plan.page_rows)
        pages = [factors[slot, page, pl.ds(h, 1), lanes] for page in range(plan.pages_a_block)]
        return jnp.concatenate(pages, axis=1)

    x = factors_of_copy(0)
    for j in range(1, plan.fold):
        x = jnp.where(copy == j, factors_of_copy(j), x)
    return x


def _scores(plan: TpuPagedPlan, r: TpuRefs, slot, h, rows, copy):
    """Return scaled and capped products of queries and keys: [rows, block_rows]."""
    z = _dot(r.q_rows[h, rows], r.k[slot, h].astype(plan.compute), 1)
    if plan.has_scales:
        z *= _factors(plan, r.k_factors, slot, h, copy) * plan.scale
    else:
        z *= plan.scale
    if plan.soft_cap is not None:
        z = plan.soft_cap * jnp.tanh(z / plan.soft_cap)
    return z


def _accumulate(r: TpuRefs, h, rows, z):
    """Add masked scores to the top and total of these rows of head h, fade their sum, and return
    the weights."""
    old = r.top[h, rows]  # [rows, 128]
    top = jnp.maximum(old, z.max(axis=1, keepdims=True))
    fade = jnp.exp(old - top)
    weight = jnp.exp(z - top[:, :1])
    r.top[h, rows] = top
    r.total[h, rows] = r.total[h, rows] * fade + weight.sum(axis=1, keepdims=True)
    r.acc[h, rows] *= fade[:, :1]
    return weight


def _dot(a, b, contract: int):
    """Return a [m, c] times b, whose axis `contract` is c; exact products, sums in float32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def store_result(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem, tokens: int) -> None:
    """Merge the copies, divide, and store the heads in the result's layout."""
    slot = rem(item.index, 2)
    num_rows = plan.group * tokens
    if tokens == 1:
        heads = [_result(plan, r, k, num_rows) for k in range(plan.num_kv_heads)]
        results, sums = zip(*heads, strict=True)  # [G, L], [G, 128]
        r.out_tile[slot, 0] = jnp.concatenate(results).astype(r.out_tile.dtype)
        if plan.has_lse:
            heads = jnp.concatenate(sums)[:, :1]  # [N, 1]
            shape = (heads.shape[0], r.lse_tile.shape[3])
            row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
            lane_values = jnp.where(row == lane, heads, 0)
            r.lse_tile[slot, 0] = lane_values.sum(axis=0, keepdims=True)
        return

    def store_head(k, _):
        r.acc[k, :num_rows], lse = _result(plan, r, k, num_rows)
        if plan.has_lse:
            r.top[k, :num_rows] = lse

    def transpose(i, _):
        heads = [r.acc[:, _run(i, g * tokens)] for g in range(plan.group)]
        heads = jnp.stack(heads, axis=1).reshape(-1, TOKEN_RUN, r.acc.shape[2])  # [N, ...]
        r.out_tile[slot, _run(i)] = jnp.swapaxes(heads, 0, 1).astype(r.out_tile.dtype)
        if plan.has_lse:
            r.lse_tile[slot, _run(i)] = _lse_of_run(plan, r, i, tokens)[:, None]

    jax.lax.fori_loop(0, plan.num_kv_heads, store_head, None)
    jax.lax.fori_loop(0, tokens // TOKEN_RUN, transpose, None)


def _lse_of_run(plan: TpuPagedPlan, r: TpuRefs, i, tokens: int):
    """Return lse with head n in lane n: [TOKEN_RUN, Z]."""
    shape = (TOKEN_RUN, r.lse_tile.shape[3])
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)

    def add_head(k, x):
        for g in range(plan.group):
            x = jnp.where(lane == k * plan.group + g, r.top[k, _run(i, g * tokens)][:, :1], x)
        return x

    return jax.lax.fori_loop(0, plan.num_kv_heads, add_head, jnp.zeros(shape, jnp.float32))


def _result(plan: TpuPagedPlan, r: TpuRefs, k, num_rows: int):
    """Return the attention of KV head k's queries in the first H lanes, [num_rows, L], and the
    logarithm of the sum of their weights, [num_rows, 128]."""
    parts = [slice(j * num_rows, (j + 1) * num_rows) for j in range(plan.fold)]
    top = r.top[k, parts[0]]
    for part in parts[1:]:
        top = jnp.maximum(top, r.top[k, part])
    total, acc = jnp.zeros_like(top), jnp.zeros((num_rows, r.acc.shape[2]), jnp.float32)
    lane = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1)
    for j, part in enumerate(parts):
        share = jnp.exp(r.top[k, part] - top)
        total += r.total[k, part] * share
        copy_result = r.acc[k, part] * share[:, :1]
        if plan.fold > 1:  # other lanes hold products with values of other parities
            copy_result = jnp.where(div(lane, plan.head_dim) == j, copy_result, 0)
        acc += copy_result
    folded = acc
    for j in range(1, plan.fold):
        folded += pltpu.roll(acc, acc.shape[1] - j * plan.head_dim, 1)
    lse = top + jnp.log(total) if plan.has_lse else None
    return folded / jnp.where(total == 0, 1, total)[:, :1], lse
