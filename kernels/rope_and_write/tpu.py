"""Rotary embedding and cache write on TPUs: the turn in XLA, the write in one Pallas kernel.

Formula and contract: `api.py`. XLA fuses the turn and the quantization with what made q, k and v;
what it does badly is the write, since a scatter goes token by token and head by head. It writes the
scales too, in place where a page has a multiple of 128 tokens; with fewer it lays their pool
[P, K, B] out with P last (v5e), and copies it to scatter, as it would for a kernel. The attention
kernel of a TPU stores a step's keys and values itself; this is for those who call another.

A DMA moves whole tiles (16 rows of 128 bfloat16 lanes, 32 rows of int8), and a token is one row of
one. So the kernel walks over the *groups* of rows that the step's tokens lie in: it fetches a
group, puts its run of tokens in, and writes the group back, while the next one is on its way.
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
from jaxinfer.kernels.kv_pages import KVPages, quantize_heads, scale_cell
from jaxinfer.kernels.rotary import rotate

TILE_BYTES = 32  # rows of a tile times bytes of a number


class Plan(NamedTuple):
    """What the kernel is compiled for."""

    head_dim: int
    fold: int  # tokens of a row of lanes (`folding.py`)
    page_rows: int
    group: int  # rows of lanes fetched together; a divisor of `page_rows`

    @property
    def tokens(self) -> int:
        """That a group holds."""
        return self.group * self.fold


class Runs(NamedTuple):
    """The step's runs of tokens of one group, in token order; behind the last, empty ones."""

    page: jax.Array  # [T]
    group: jax.Array  # [T]: of the page
    first: jax.Array  # [T]: token
    end: jax.Array  # [T]: token behind the last
    cell: jax.Array  # [T], of each token


def rope_and_write(
    q,  # [T, N, H]
    k,  # [T, K, H]
    v,  # [T, K, H] or None
    cos,  # [T, half] or None
    sin,  # [T, half] or None
    pages,  # k, v: [P, K, B, H] or folded
    page,  # [T]
    cell,  # [T]
    *,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Declines (`NotImplementedError`) float16 pages, which Mosaic does not load."""
    if pages.k.dtype == jnp.float16 and not interpret:
        raise NotImplementedError("Mosaic loads no float16; use a bfloat16 or float32 cache")
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    rows = pages.k.shape[2]
    tile = TILE_BYTES // pages.k.dtype.itemsize
    plan = Plan(
        head_dim=k.shape[2],
        fold=fold_of(pages.k.shape[3], k.shape[2]),
        page_rows=rows,
        group=tile if rows % tile == 0 else rows,
    )
    runs, num_runs = _runs(plan, page, cell, pages.k.shape[0])
    new, scales = [], []
    held = [pages.k] if pages.v is None else [pages.k, pages.v]
    for x, old in ((k, pages.k_scales), (v, pages.v_scales))[: len(held)]:
        if old is not None:
            x, scale = quantize_heads(x, pages.k.dtype)
            place = scale_cell(cell, rows, plan.fold)
            scales.append(old.at[page, :, place].set(scale, mode="drop"))
        new.append(_rows_of_lanes(plan, x.astype(pages.k.dtype), pages.k.shape[3]))
    stored = _call(plan, held, interpret, num_runs)(*runs, *new, *held)
    return q, KVPages(stored[0], None if pages.v is None else stored[1], *scales)


def _runs(plan: Plan, page, cell, num_pages: int) -> tuple[Runs, jax.Array]:
    """The runs and their number, which is 1 where there are none: of no token, in page 0."""
    T = page.shape[0]
    token = jnp.arange(T, dtype=jnp.int32)
    is_stored = page < num_pages
    group = cell // plan.tokens
    of_pool = jnp.where(is_stored, page * (plan.page_rows // plan.group) + group, -1)
    before, after = jnp.roll(of_pool, 1), jnp.roll(of_pool, -1)
    is_first = is_stored & ((token == 0) | (of_pool != before))
    is_last = is_stored & ((token == T - 1) | (of_pool != after))
    first = jnp.sort(jnp.where(is_first, token, T))
    end = jnp.sort(jnp.where(is_last, token + 1, T))
    is_run = first < T
    first = jnp.where(is_run, first, 0)
    of_run = lambda x: jnp.where(is_run, x[first], 0).astype(jnp.int32)
    runs = Runs(of_run(page), of_run(group), first, jnp.where(is_run, end, 0), cell)
    num_runs = jnp.maximum(is_first.sum(dtype=jnp.int32), 1)
    return Runs(*(x.astype(jnp.int32) for x in runs)), num_runs


def _rows_of_lanes(plan: Plan, x, lanes: int):
    """[T, K, H] -> [T + tokens of a group, K, L]: the head over and over, so that the part of the
    row that it belongs to has it; a run's tokens are fetched as if it filled its group."""
    x = jnp.tile(x, (1, 1, plan.fold))
    behind = lanes - plan.fold * plan.head_dim
    return jnp.pad(x, ((0, plan.tokens), (0, 0), (0, behind)))


def _call(plan: Plan, pages: list[Any], interpret, num_runs):
    """The `pallas_call`; operands: runs, new keys and values, pages of keys and values; or keys
    alone."""
    _, K, _, lanes = pages[0].shape
    of_run = lambda i, page, group, first, *_: (first[i], 0, 0)
    of_group = lambda i, page, group, *_: (page[i], 0, group[i], 0)
    new = pl.BlockSpec((pl.Element(plan.tokens), pl.Element(K), pl.Element(lanes)), of_run)
    held = pl.BlockSpec((1, K, plan.group, lanes), of_group)
    num_scalars, num = len(Runs._fields), len(pages)
    return pl.pallas_call(
        partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(num_runs,),
            in_specs=[new] * num + [held] * num,
            out_specs=[held] * num,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        input_output_aliases={num_scalars + num + i: i for i in range(num)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="rope_and_write",
    )


def _kernel(
    plan: Plan,
    page,  # [T], of each run, as the next three
    group,
    first,
    end,
    cell,  # [T], of each token
    *arrays,  # new [tokens, K, L], old and out [1, K, group, L], each of keys, then of values
) -> None:
    """One run: its group as it was, with the run's tokens in their places."""
    runs = Runs(page, group, first, end, cell)
    num = len(arrays) // 3
    for i in range(num):
        _put_rows(plan, runs, *arrays[i::num])


def _put_rows(plan: Plan, runs: Runs, new, old, out) -> None:
    """In float32, which holds every number of a narrower type: masks and selects of those are not
    to be had on all chips."""
    i = pl.program_id(0)
    first = runs.first[i]
    shape = out.shape[1:]  # [K, group, L]
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + runs.group[i] * plan.group
    part = jax.lax.broadcasted_iota(jnp.int32, shape, 2) // plan.head_dim

    def put(token, held):
        cell = runs.cell[token]
        is_its = (row == div(cell, plan.fold)) & (part == rem(cell, plan.fold))
        return jnp.where(is_its, new[token - first].astype(jnp.float32)[:, None], held)

    held = jax.lax.fori_loop(first, runs.end[i], put, old[0].astype(jnp.float32))
    out[0] = held.astype(out.dtype)
