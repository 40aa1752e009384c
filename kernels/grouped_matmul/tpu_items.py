"""The work list of the TPU kernel, made by a kernel of its own.

In plain JAX the list took 17 to 25 launches (compiled for a v5e, E = 8 and 128), each of some
microseconds, in every layer; a scalar core writes it in one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class GroupItems(NamedTuple):
    """The list, each field [I]: a tile of rows and a group with rows in it, in the order of rows.

    A tile of no group has one item. Items past the last repeat its tile.
    """

    tile: jax.Array
    group: jax.Array
    first: jax.Array  # row of the group, first and end; equal where there is nothing to multiply
    end: jax.Array


def work_list(group_sizes, T: int, tile: int, interpret: Any = False) -> GroupItems:
    """Return the items of T rows; I is the number of tiles plus the number of groups, whatever the
    sizes are."""
    num_tiles, E = -(-T // tile), group_sizes.shape[0]
    field = jax.ShapeDtypeStruct((num_tiles + min(E, T),), jnp.int32)
    in_smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    fields = pl.pallas_call(
        partial(_kernel, num_tiles, tile),
        in_specs=[in_smem],
        out_specs=[in_smem] * len(GroupItems._fields),
        out_shape=[field] * len(GroupItems._fields),
        interpret=interpret,
        name="grouped_matmul_items",
    )(group_sizes.astype(jnp.int32))
    return GroupItems(*fields)


def _kernel(num_tiles: int, tile: int, sizes, *fields) -> None:
    items = GroupItems(*fields)
    tile_after = lambda row: jax.lax.div(row + (tile - 1), tile)

    def write(item, *values):
        for ref, value in zip(items, values, strict=True):
            ref[item] = value
        return item + 1

    def add_group(e, before):
        item, first, last_used = before
        end = first + sizes[e]
        first_tile = jax.lax.div(first, tile)
        count = jnp.where(first < end, tile_after(end) - first_tile, 0)
        write_item = lambda k, item: write(item, first_tile + k, e, first, end)
        item = jax.lax.fori_loop(0, count, write_item, item)
        return item, end, jnp.where(first < end, e, last_used)

    nothing = (jnp.int32(0), jnp.int32(0), jnp.int32(0))
    used, num_rows, last_used = jax.lax.fori_loop(0, sizes.shape[0], add_group, nothing)
    first_free = tile_after(num_rows) - used
    # The matrix of the last group is loaded already, and is not fetched again.
    without_rows = lambda i, _: write(
        i, jnp.minimum(first_free + i, num_tiles - 1), last_used, 0, 0
    )
    jax.lax.fori_loop(used, items.tile.shape[0], without_rows, jnp.int32(0))
