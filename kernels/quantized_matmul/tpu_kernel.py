"""The body of the TPU's product with a quantized weight: one tile of rows for a tile of the result.

First the tile's values are converted to weights that the multiplier takes (`_weights`), then they
are multiplied. A group's scale multiplies the weights (`is_scaled_first`) or the group's sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class TpuQuantizedPlan(NamedTuple):
    """What a kernel is compiled for."""

    operand: Any  # dtype of the operands of the product
    row_tile: int
    group: int  # rows
    half: int  # byte rows in a run of 4-bit values; 0: values of 8 bits
    middle: int  # the middle of the values, where there are no zeros
    has_zeros: bool
    is_scaled_first: bool

    def makes_weights(self, dtype: Any) -> bool:
        """Return whether values of `dtype` need any work before they are multiplied."""
        return bool(self.half) or self.is_scaled_first or dtype != self.operand


def kernel(plan: TpuQuantizedPlan, has_x_scale: bool, *refs):
    refs = iter(refs)
    x_ref = next(refs)  # [tokens, rows]
    values_ref = next(refs)  # [rows, columns], of 4 bits [rows / 2, columns]
    scales_ref = next(refs)  # [groups of D, columns]
    zeros_ref = next(refs) if plan.has_zeros else None  # [groups of D, columns]
    x_scale_ref = next(refs) if has_x_scale else None  # [tokens, 1]
    out_ref = next(refs)  # [tokens, columns]
    sum_ref = next(refs)  # [tokens, columns]
    w_ref = next(refs, values_ref)  # [rows, columns]

    d = pl.program_id(2)

    @pl.when(d == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    if w_ref is not values_ref:
        _weights(plan, d, values_ref, scales_ref, zeros_ref, w_ref)
    if plan.is_scaled_first:
        sum_ref[...] += _product(x_ref[...], w_ref[...])
    else:
        step = min(plan.group, plan.row_tile)
        for first in range(0, plan.row_tile, step):
            x = x_ref[:, first : first + step]
            sums = _product(x, w_ref[first : first + step, :])
            if zeros_ref is not None:
                total = x.astype(jnp.float32).sum(axis=1, keepdims=True)
                sums -= total * _group_row(plan, d, first, zeros_ref)
            sum_ref[...] += sums * _group_row(plan, d, first, scales_ref)

    @pl.when(d == pl.num_programs(2) - 1)
    def _():
        out = sum_ref[...]
        if x_scale_ref is not None:
            out *= x_scale_ref[...]
        out_ref[...] = out.astype(out_ref.dtype)


def _product(x, w):
    """Return the product in float32 [tokens, columns]; a tile's sums of int8 are exact."""
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    return jax.lax.dot_general(
        x,
        w,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if is_integer else jnp.float32,
    ).astype(jnp.float32)


def _group_row(plan: TpuQuantizedPlan, d, row: int, ref):
    """Return the scales or zeros [1, columns] of a row of the tile."""
    if plan.group >= plan.row_tile:
        group = d * plan.row_tile // plan.group
    else:
        group = d * (plan.row_tile // plan.group) + row // plan.group
    return ref[pl.ds(group, 1), :]


def _weights(plan: TpuQuantizedPlan, d, values_ref, scales_ref, zeros_ref, w_ref):
    """Fill `w_ref`, at most a group at a time."""

    def put(row: int, count: int, values):
        if plan.is_scaled_first:
            zeros = plan.middle if zeros_ref is None else _group_row(plan, d, row, zeros_ref)
            values = (values.astype(jnp.float32) - zeros) * _group_row(plan, d, row, scales_ref)
        elif plan.middle:
            values = values - plan.middle
        if jnp.issubdtype(values.dtype, jnp.integer) and plan.operand != jnp.int8:
            values = values.astype(jnp.float32)
        w_ref[row : row + count, :] = values.astype(plan.operand)

    if not plan.half:
        count = min(plan.group, plan.row_tile)
        for row in range(0, plan.row_tile, count):
            put(row, count, values_ref[row : row + count, :])
        return
    count = min(plan.half, plan.group)
    for run in range(0, plan.row_tile, 2 * plan.half):
        for start in range(0, plan.half, count):
            first = run // 2 + start
            packed = values_ref[first : first + count, :].astype(jnp.int32)
            put(run + start, count, packed & 15)
            put(run + start + plan.half, count, packed >> 4)
