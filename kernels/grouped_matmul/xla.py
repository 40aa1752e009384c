"""Grouped products in plain JAX.

On a CPU: a loop over the items, tiles of rows of one group each. Cost follows the
rows and the groups in use. `jax.lax.ragged_dot` multiplies every row with every matrix there, and
copies the weights first (two cores, float32, E = 64, D = 512, F = 768, 512 rows: 183 ms, the loop
9; E = 8, D = 1024, F = 2048, 64 rows: 21 and 3 ms).

On a TPU `ragged_dot` is two kernels of the compiler's own. On a GPU it is a dense product with a
copy of x for each group: it is used while the copies are no larger than the weights, and the loop
for more rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.grouped_matmul.weights import shape_of
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize

MOST_TILE = 64  # rows; measured on two cores, E = 8 and 64: 64 is the best from 64 rows a group up
LEAST_TILE = 4  # smaller tiles gain nothing


def grouped_matmul(
    x,  # [T, D]
    weights,  # [E, D, F]
    group_sizes,  # [E]
    *,
    tile: int | None = None,  # rows of an item of the loop
):
    where, T, (E, _, F) = platform(), x.shape[0], shape_of(weights)
    if tile is None and (where == "tpu" or (where == "gpu" and T <= F)):
        if isinstance(weights, QuantArray):
            weights = dequantize(weights, x.dtype)
        out = jax.lax.ragged_dot(x, weights, group_sizes)
    else:
        out = _by_items(x, weights, group_sizes, tile or tile_for(T, E))
    return jnp.where(jnp.arange(T)[:, None] < group_sizes.sum(), out, 0)


def tile_for(T: int, E: int) -> int:
    """Return the rows of an item: about an even share, so that few are computed in vain."""
    share = max(1, T // E)
    return max(LEAST_TILE, min(MOST_TILE, 1 << (share - 1).bit_length()))


def _by_items(x, weights, group_sizes, tile: int):
    """Compute the items in the order of their rows.

    What an item computes past its group's end is overwritten by the next ones, or lies past the
    last group.
    """
    T, D = x.shape
    F = shape_of(weights)[2]
    tiles = -(-group_sizes // tile)
    ends = jnp.cumsum(tiles)
    starts = jnp.cumsum(group_sizes) - group_sizes
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def multiply_item(item, out):
        group = (ends <= item).sum(dtype=jnp.int32)
        first = starts[group] + (item - ends[group] + tiles[group]) * tile
        rows = jax.lax.dynamic_slice(padded, (first, 0), (tile, D))
        product = jnp.matmul(rows, _matrix(weights, group, x.dtype), preferred_element_type=x.dtype)
        return jax.lax.dynamic_update_slice(out, product, (first, 0))

    out = jax.lax.fori_loop(0, ends[-1], multiply_item, jnp.zeros((T + tile, F), x.dtype))
    return out[:T]


def _matrix(weights: Any, group, dtype) -> jax.Array:
    """Return one group's matrix [D, F], dequantized by itself."""
    one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, group, keepdims=False), weights)
    return dequantize(one, dtype) if isinstance(one, QuantArray) else one.astype(dtype)
