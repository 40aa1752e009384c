"""Matrix products with sharded inputs: each device computes one term of a sum over the devices.

    exact      the product, then an all-reduce
    int8       the product, then an all-reduce that sends int8 (`compressed.py`)
    overlap    the product in n parts; each part travels round the ring while the next one is
               computed, so that only the last hop takes time if computing a part takes longer than
               a hop (S. Wang et al., "Overlap Communication with Dependent Computation via
               Decomposition in Large Deep Learning Models", ASPLOS 2023)

The layout chooses the way, statically.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.kernels.dispatch import platform
from jaxinfer.sharding.collectives import Axes, all_gather, all_sum, all_sum_in_order, rank
from jaxinfer.sharding.compressed import compressed_sum
from jaxinfer.sharding.rules import Layout

# Each part of the tokens reads the whole weight, which is free only if the part's arithmetic takes
# longer. In bfloat16 that needs as many tokens as peak FLOP/s over bytes/s: 240 on a v5e, 295 on an
# H100, 560 on a v6e.
MIN_TOKENS_PER_PART = 512

Product = Callable[[jax.Array, Any], jax.Array]


def sum_of_products(
    product: Product, x: Float[Array, "T inputs"], weight: Any, layout: Layout, axes: Axes
) -> Float[Array, "T outputs"]:
    """Return `product(x, weight)` summed over `axes`, in the way that the layout chooses.

    `weight` is an array [inputs, outputs], or a quantized weight, which cannot be sliced here.
    """
    if not axes:
        return product(x, weight)
    if layout.overlaps:
        return overlapped_product(product, x, weight, axes, in_order=layout.sums_in_order)
    return summed(product(x, weight), layout, axes)


def summed(x: Float[Array, "T D"], layout: Layout, axes: Axes) -> Float[Array, "T D"]:
    """Return x summed over `axes`, exactly or in int8, as the layout chooses."""
    if layout.all_reduce == "int8":
        return compressed_sum(x, axes)
    return exact_sum(x, axes, in_order=layout.sums_in_order)


def exact_sum(x: Float[Array, "T D"], axes: Axes, *, in_order: bool) -> Float[Array, "T D"]:
    """Return x summed over `axes`; with `in_order` its bits do not depend on the position in x."""
    # The sum of two numbers has the same bits in either order.
    if in_order and axes and lax.axis_size(axes) > 2:
        return all_sum_in_order(x, axes)
    return all_sum(x, axes)


def overlapped_product(
    product: Product,
    x: Float[Array, "T inputs"],
    weight: Any,
    axes: Axes,
    *,
    in_order: bool = False,
) -> Float[Array, "T outputs"]:
    """Return the sum over `axes` of the devices' products, up to rounding; equal on all devices.

    The outputs are split if the weight is an array whose outputs n divides; the weight is then read
    once in all. On a GPU they are not, because XLA copies each slice of the weight before it
    multiplies. Otherwise the tokens are split if there are enough of them; if not, the product is
    computed in one piece and summed afterwards. With `in_order` the tokens are never split, which
    would make a token's bits depend on its position.
    """
    n = lax.axis_size(axes)
    is_divisible = isinstance(weight, jax.Array) and weight.shape[1] % n == 0
    if is_divisible and min_overlapped_tokens(n, is_array=True, in_order=in_order) == 1:
        return product_by_outputs(product, x, weight, axes)
    if x.shape[0] >= min_overlapped_tokens(n, is_array=False, in_order=in_order):
        return product_by_tokens(product, x, weight, axes)
    return exact_sum(product(x, weight), axes, in_order=in_order)


def min_overlapped_tokens(n: int, *, is_array: bool, in_order: bool) -> float:
    """Return from how many tokens on `overlapped_product` works in parts on n devices.

    Infinity means never. `is_array` is False for a quantized weight.
    """
    if is_array and platform() != "gpu":
        return 1.0
    return math.inf if in_order else float(n * MIN_TOKENS_PER_PART)


def product_by_outputs(
    product: Product, x: Float[Array, "T inputs"], weight: Float[Array, "inputs F"], axes: Axes
) -> Float[Array, "T F"]:
    """`overlapped_product` with the outputs split; n must divide their number."""
    size = weight.shape[1] // lax.axis_size(axes)

    def part(x: jax.Array, index: jax.Array) -> jax.Array:
        return product(x, lax.dynamic_slice_in_dim(weight, index * jnp.int32(size), size, 1))

    return all_gather(_reduce_scatter(part, x, axes), axes, dim=1)


def product_by_tokens(
    product: Product, x: Float[Array, "T inputs"], weight: Any, axes: Axes
) -> Float[Array, "T outputs"]:
    """`overlapped_product` with the tokens split, padded to a multiple of n."""
    T, n = x.shape[0], lax.axis_size(axes)
    size = -(-T // n)
    x = jnp.pad(x, ((0, size * n - T), (0, 0)))

    def part(x: jax.Array, index: jax.Array) -> jax.Array:
        return product(lax.dynamic_slice_in_dim(x, index * jnp.int32(size), size, 0), weight)

    return all_gather(_reduce_scatter(part, x, axes), axes, dim=0)[:T]


def _reduce_scatter(
    part: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, axes: Axes
) -> jax.Array:
    """Return, on device r, the sum over all devices of their `part(x, r)`.

    The sum of part p starts at device p + 1 and travels round the ring; each device adds its term,
    device p the last one.
    """
    n = lax.axis_size(axes)
    ring = [(i, (i + 1) % n) for i in range(n)]
    index = lax.rem(rank(axes) + jnp.int32(n - 1), jnp.int32(n))
    total = part(x, index)
    for _ in range(n - 1):
        # Start a part only when the previous one is sent. Otherwise XLA merges all parts into one
        # product (for an H100), which leaves nothing to overlap with a hop.
        total, x, index = lax.optimization_barrier((total, x, index))
        index = lax.rem(index + jnp.int32(n - 1), jnp.int32(n))
        total = lax.ppermute(total, axes, ring) + part(x, index)
    return total
