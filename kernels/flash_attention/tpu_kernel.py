"""The body of the TPU kernel: one step of a grid is one tile of queries by one of keys.

The grid's last axis walks the steps of `blocks.steps_of`, so that no step is spent on a tile that
no query sees, and the pipeline continues from one tile of queries to the next. The masks and
scores, mods included, are the formula's own functions, traced into the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxinfer.kernels.flash_attention.rule import FlashRule, is_seen, scores

LANES = 128
# Below any score, and finite: exp(-inf - LOWEST) is 0 where -inf for both would give NaN.
LOWEST = -1e30


class TpuFlashPlan(NamedTuple):
    """What the kernel is compiled for."""

    rule: FlashRule
    tile: tuple[int, int]  # M queries, B keys
    num_k_tiles: int
    has_row_lists: bool  # lists differ by row
    has_head_lists: bool  # lists differ by head

    def list_of(self, row, head):
        return (row if self.has_row_lists else 0), (head if self.has_head_lists else 0)

    def step(self, r: Any, row, head, index):
        """Return the packed step; past the last one the last again, so that nothing new is
        fetched."""
        at = self.list_of(row, head)
        return r.steps[(*at, jnp.minimum(index, r.counts[at] - 1))]

    def tiles(self, step):
        """Return (tile of queries, tile of keys)."""
        return jax.lax.div(step >> 4, self.num_k_tiles), jax.lax.rem(step >> 4, self.num_k_tiles)


class TpuFlashScalars(NamedTuple):
    """Arrays that are in SMEM before the grid starts."""

    steps: Any  # [R or 1, N or 1, steps]
    counts: Any  # [R or 1, N or 1]
    offsets: Any  # [R]
    lengths: Any  # [R]
    sinks: Any  # [N]
    slopes: Any  # [N]


class TpuFlashRefs(NamedTuple):
    q: Any  # [M, H]
    k: Any  # [B, H]
    v: Any  # [B, H]
    start: Any  # [C, B]
    end: Any  # [C, B]
    out: Any  # [M, H]
    lse: Any  # [1, M]
    top: Any  # [M, LANES]
    total: Any  # [M, LANES]
    acc: Any  # [M, H]


def kernel(plan: TpuFlashPlan, missing: tuple[str, ...], *refs) -> None:
    """Entry point: `refs` as in `TpuFlashScalars` and `TpuFlashRefs`, without those named in
    `missing`."""
    given = iter(refs)
    fields = (*TpuFlashScalars._fields, *TpuFlashRefs._fields)
    found = [None if name in missing else next(given) for name in fields]
    s, r = (
        TpuFlashScalars(*found[: len(TpuFlashScalars._fields)]),
        TpuFlashRefs(*found[len(TpuFlashScalars._fields) :]),
    )
    row, head, index = (pl.program_id(axis) for axis in range(3))
    is_real = index < s.counts[plan.list_of(row, head)]
    step = plan.step(s, row, head, index)
    kind, is_first, is_last = (step >> 2) & 3, (step & 2) != 0, (step & 1) != 0

    @pl.when(is_real & is_first)
    def _():
        sink = LOWEST if s.sinks is None else s.sinks[head]
        r.top[...] = jnp.full(r.top.shape, sink, jnp.float32)
        r.total[...] = jnp.full(r.total.shape, 0 if s.sinks is None else 1, jnp.float32)
        r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)

    for is_cut in (False, True):
        pl.when(is_real & (kind == (1 if is_cut else 2)))(
            lambda is_cut=is_cut: _attend(plan, s, r, row, head, step, is_cut=is_cut)
        )

    @pl.when(is_real & is_last)
    def _():
        total = r.total[...]
        r.out[...] = (r.acc[...] / jnp.where(total == 0, 1, total)[:, :1]).astype(r.out.dtype)
        if r.lse is not None:
            lse = jnp.where(total > 0, r.top[...] + jnp.log(total), -jnp.inf)
            r.lse[...] = jnp.swapaxes(lse, 0, 1)[:1]


def _attend(
    plan: TpuFlashPlan, s: TpuFlashScalars, r: TpuFlashRefs, row, head, step, *, is_cut: bool
) -> None:
    """Add one tile of keys to the running softmax (arXiv:2205.14135)."""
    (M, B), rule = plan.tile, plan.rule
    i, j = plan.tiles(step)
    z = _dot(r.q[...], r.k[...], 1) * rule.scale
    q_position = s.offsets[row] + i * M + jax.lax.broadcasted_iota(jnp.int32, (M, B), 0)
    k_position = j * B + jax.lax.broadcasted_iota(jnp.int32, (M, B), 1)
    at = (row, head, q_position, k_position)
    z = scores(rule, z, *at, None if s.slopes is None else s.slopes[head])
    v = r.v[...]
    if is_cut:
        intervals = []
        if r.start is not None:
            starts, ends = r.start[...], r.end[...]
            count = starts.shape[0]
            intervals = [(starts[c : c + 1], ends[c : c + 1]) for c in range(count)]
        z = jnp.where(is_seen(rule, *at, s.lengths[row], intervals), z, -jnp.inf)
        is_key = j * B + jax.lax.broadcasted_iota(jnp.int32, (B, 1), 0) < s.lengths[row]
        v = jnp.where(is_key, v, 0)  # 0 times NaN would be NaN
    old = r.top[...]
    top = jnp.maximum(old, z.max(axis=1, keepdims=True))
    fade = jnp.exp(old - top)
    weight = jnp.exp(z - top[:, :1])
    r.top[...] = top
    r.total[...] = r.total[...] * fade + weight.sum(axis=1, keepdims=True)
    r.acc[...] = r.acc[...] * fade[:, :1] + _dot(weight.astype(v.dtype), v, 0)


def _dot(a, b, contract: int):
    """Return a [m, c] times b, whose axis `contract` is c; exact products, sums in float32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
