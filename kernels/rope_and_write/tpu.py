"""Rotary embedding and cache write on TPUs: the rotation in XLA, the write in one Pallas kernel.

Formula and contract: `api.py`. XLA fuses the rotation and the quantization with what made q, k and
v; what it does badly is the write, since a scatter goes token by token and head by head. It writes
the scales too, in place where a page has a multiple of 128 tokens; with fewer it lays their pool
[P, K, B] out with P last (v5e), and copies it to scatter, as it would for a kernel. The attention
kernel of a TPU stores a step's keys and values itself; this one serves calls that use another.

A DMA moves whole tiles (16 rows of 128 bfloat16 lanes, 32 rows of int8), and a token is one row of
a tile. So the kernel walks over the *groups* of rows that the step's tokens lie in: it fetches a
group, puts its run of tokens in, and writes the group back, while the next one is fetched.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from jaxinfer.kernels.folding import fold_of
from jaxinfer.kernels.kv_pages import KVPages, NewTokens, quantize_heads, scale_offset
from jaxinfer.kernels.rotary import Rotary, rotate

TILE_BYTES = 32  # rows of a tile times bytes of a number


class TpuWritePlan(NamedTuple):
    """What the kernel is compiled for."""

    head_dim: int
    fold: int  # tokens of a row of lanes (`folding.py`)
    page_rows: int
    group: int  # rows of lanes fetched together; a divisor of `page_rows`

    @property
    def tokens(self) -> int:
        """The number of tokens in a group."""
        return self.group * self.fold


class TokenRuns(NamedTuple):
    """The step's runs of tokens of one group, in token order; empty runs follow the last."""

    page: jax.Array  # [T]
    group: jax.Array  # [T]: of the page
    first: jax.Array  # [T]: token
    end: jax.Array  # [T]: the token after the last
    offset: jax.Array  # [T]: of each token in its page


def rope_and_write(
    q,  # [T, N, H]
    new: NewTokens,
    rotary: Rotary | None,
    pages: KVPages,  # k, v: [P, K, B, H] or folded
    *,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return (rotated queries, pages). Declines (`NotImplementedError`) float16 pages, which Mosaic
    does not load."""
    if pages.k.dtype == jnp.float16 and not interpret:
        raise NotImplementedError("Mosaic loads no float16; use a bfloat16 or float32 cache")
    k, v, page, offset = new
    x: Any
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    rows = pages.k.shape[2]
    tile = TILE_BYTES // pages.k.dtype.itemsize
    plan = TpuWritePlan(
        head_dim=k.shape[2],
        fold=fold_of(pages.k.shape[3], k.shape[2]),
        page_rows=rows,
        group=tile if rows % tile == 0 else rows,
    )
    runs, num_runs = _runs(plan, page, offset, pages.k.shape[0])
    values, scales = [], []
    arrays = [pages.k] if pages.v is None else [pages.k, pages.v]
    for x, old in ((k, pages.k_scales), (v, pages.v_scales))[: len(arrays)]:
        if old is not None:
            x, scale = quantize_heads(x, pages.k.dtype)
            at = scale_offset(offset, rows, plan.fold)
            scales.append(old.at[page, :, at].set(scale, mode="drop"))
        values.append(_rows_of_lanes(plan, x.astype(pages.k.dtype), pages.k.shape[3]))
    stored = _call(plan, arrays, interpret, num_runs)(*runs, *values, *arrays)
    return q, KVPages(stored[0], None if pages.v is None else stored[1], *scales)


def _runs(plan: TpuWritePlan, page, offset, num_pages: int) -> tuple[TokenRuns, jax.Array]:
    """Return the runs and their number; where no token is stored, one run of no token in page 0."""
    T = page.shape[0]
    token = jnp.arange(T, dtype=jnp.int32)
    is_stored = page < num_pages
    group = offset // plan.tokens
    pool_group = jnp.where(is_stored, page * (plan.page_rows // plan.group) + group, -1)
    before, after = jnp.roll(pool_group, 1), jnp.roll(pool_group, -1)
    is_first = is_stored & ((token == 0) | (pool_group != before))
    is_last = is_stored & ((token == T - 1) | (pool_group != after))
    first = jnp.sort(jnp.where(is_first, token, T))
    end = jnp.sort(jnp.where(is_last, token + 1, T))
    is_run = first < T
    first = jnp.where(is_run, first, 0)
    per_run = lambda x: jnp.where(is_run, x[first], 0).astype(jnp.int32)
    runs = TokenRuns(per_run(page), per_run(group), first, jnp.where(is_run, end, 0), offset)
    num_runs = jnp.maximum(is_first.sum(dtype=jnp.int32), 1)
    return TokenRuns(*(x.astype(jnp.int32) for x in runs)), num_runs


def _rows_of_lanes(plan: TpuWritePlan, x, lanes: int):
    """[T, K, H] -> [T + tokens of a group, K, L]: each head repeated along the lanes, so that it is
    present in the part of the row that it belongs to.

    The padding lets a run's tokens be fetched as if the run filled its group.
    """
    x = jnp.tile(x, (1, 1, plan.fold))
    behind = lanes - plan.fold * plan.head_dim
    return jnp.pad(x, ((0, plan.tokens), (0, 0), (0, behind)))


def _call(plan: TpuWritePlan, pages: list[Any], interpret, num_runs):
    """Return the `pallas_call`; operands: runs, new keys (and values), pages of keys (and of
    values)."""
    _, K, _, lanes = pages[0].shape
    run_at = lambda i, page, group, first, *_: (first[i], 0, 0)
    group_at = lambda i, page, group, *_: (page[i], 0, group[i], 0)
    new = pl.BlockSpec((pl.Element(plan.tokens), pl.Element(K), pl.Element(lanes)), run_at)
    stored = pl.BlockSpec((1, K, plan.group, lanes), group_at)
    num_scalars, num = len(TokenRuns._fields), len(pages)
    return pl.pallas_call(
        partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(num_runs,),
            in_specs=[new] * num + [stored] * num,
            out_specs=[stored] * num,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        input_output_aliases={num_scalars + num + i: i for i in range(num)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="rope_and_write",
    )


def _kernel(
    plan: TpuWritePlan,
    page,  # [T], of each run, as the next three
    group,
    first,
    end,
    offset,  # [T], of each token
    *arrays,  # new [tokens, K, L], old and out [1, K, group, L], each of keys, then of values
) -> None:
    """Write one run: its group as it was, with the run's tokens in their slots."""
    runs = TokenRuns(page, group, first, end, offset)
    num = len(arrays) // 3
    for i in range(num):
        _put_rows(plan, runs, *arrays[i::num])


def _put_rows(plan: TpuWritePlan, runs: TokenRuns, new, old, out) -> None:
    """Write one run's group of rows.

    In float32, which holds every number of a narrower type: not every chip has masks and selects of
    narrower types.
    """
    i = pl.program_id(0)
    first = runs.first[i]
    shape = out.shape[1:]  # [K, group, L]
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + runs.group[i] * plan.group
    part = jax.lax.broadcasted_iota(jnp.int32, shape, 2) // plan.head_dim

    def put(token, merged):
        offset = runs.offset[token]
        is_slot = (row == div(offset, plan.fold)) & (part == rem(offset, plan.fold))
        return jnp.where(is_slot, new[token - first].astype(jnp.float32)[:, None], merged)

    merged = jax.lax.fori_loop(first, runs.end[i], put, old[0].astype(jnp.float32))
    out[0] = merged.astype(out.dtype)
