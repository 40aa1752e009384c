"""Products whose inputs are split: every device's is a part of a sum, made in one of three ways.

    exact      the product, then an all-reduce
    int8       the product, then a sum that sends int8 (`compressed.py`)
    overlap    the product in n parts, each on its way round the ring while the next is made: the
               sum of all but the last hop costs no time where a part takes longer than its hop
               (S. Wang et al., "Overlap Communication with Dependent Computation via Decomposition
               in Large Deep Learning Models", ASPLOS 2023)

Which one is the layout's choice, so that it is static.
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

# Parts of tokens read the whole weight each, which costs nothing only where a part's work takes
# longer than that: from so many tokens of bfloat16 as a chip multiplies while it reads one weight
# of each: 240 on a v5e, 295 on an H100, 560 on a v6e (peak FLOP/s over bytes/s).
MIN_TOKENS_A_PART = 512

Product = Callable[[jax.Array, Any], jax.Array]


def sum_of_products(
    product: Product, x: Float[Array, "T inputs"], weight: Any, layout: Layout, axes: Axes
) -> Float[Array, "T outputs"]:
    """`product(x, weight)`, summed over `axes`, as the layout says. `weight` is an array [inputs,
    outputs], or anything else that `product` takes whole."""
    if not axes:
        return product(x, weight)
    if layout.overlaps:
        return overlapped_product(product, x, weight, axes, in_order=layout.sums_in_order)
    return summed(product(x, weight), layout, axes)


def summed(x: Float[Array, "T D"], layout: Layout, axes: Axes) -> Float[Array, "T D"]:
    """x summed over `axes`, exactly or by way of int8, as the layout says."""
    if layout.all_reduce == "int8":
        return compressed_sum(x, axes)
    return exact_sum(x, axes, in_order=layout.sums_in_order)


def exact_sum(x: Float[Array, "T D"], axes: Axes, *, in_order: bool) -> Float[Array, "T D"]:
    """x summed over `axes`; of two numbers there is one order."""
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
    """The sum over `axes` of the devices' products, to rounding; the same bits on all.

    Parts are of the outputs, which reads the weight once in all, where the weight is an array and
    the devices divide its outputs. Not on a GPU: XLA copies each part of the weight before it
    multiplies with it. Otherwise parts are of the tokens, if they are many; if not, the product is
    made at once and summed after. With `in_order` a token's bits do not depend on its place, as
    they do in parts of the tokens.
    """
    n = lax.axis_size(axes)
    is_cut = isinstance(weight, jax.Array) and weight.shape[1] % n == 0
    if is_cut and least_overlapped(n, is_array=True, in_order=in_order) == 1:
        return product_by_outputs(product, x, weight, axes)
    if x.shape[0] >= least_overlapped(n, is_array=False, in_order=in_order):
        return product_by_tokens(product, x, weight, axes)
    return exact_sum(product(x, weight), axes, in_order=in_order)


def least_overlapped(n: int, *, is_array: bool, in_order: bool) -> float:
    """How many tokens a step takes for `overlapped_product` to work in parts on n devices; infinity
    where it never does. `is_array`: the weight is no quantized one."""
    if is_array and platform() != "gpu":
        return 1
    return math.inf if in_order else n * MIN_TOKENS_A_PART


def product_by_outputs(
    product: Product, x: Float[Array, "T inputs"], weight: Float[Array, "inputs F"], axes: Axes
) -> Float[Array, "T F"]:
    """`overlapped_product` in parts of the outputs, which n divides."""
    size = weight.shape[1] // lax.axis_size(axes)

    def part(x: jax.Array, index: jax.Array) -> jax.Array:
        return product(x, lax.dynamic_slice_in_dim(weight, index * jnp.int32(size), size, 1))

    return all_gather(_scattered(part, x, axes), axes, dim=1)


def product_by_tokens(
    product: Product, x: Float[Array, "T inputs"], weight: Any, axes: Axes
) -> Float[Array, "T outputs"]:
    """`overlapped_product` in parts of the tokens, padded to a multiple of n."""
    T, n = x.shape[0], lax.axis_size(axes)
    size = -(-T // n)
    x = jnp.pad(x, ((0, size * n - T), (0, 0)))

    def part(x: jax.Array, index: jax.Array) -> jax.Array:
        return product(lax.dynamic_slice_in_dim(x, index * jnp.int32(size), size, 0), weight)

    return all_gather(_scattered(part, x, axes), axes, dim=0)[:T]


def _scattered(
    part: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, axes: Axes
) -> jax.Array:
    """On device r, the sum over all devices of their `part(x, r)`.

    Part p sets out from device p + 1, and each device on the way round adds its own to it; device
    p is the last.
    """
    n = lax.axis_size(axes)
    onward = [(i, (i + 1) % n) for i in range(n)]
    index = lax.rem(rank(axes) + jnp.int32(n - 1), jnp.int32(n))
    total = part(x, index)
    for _ in range(n - 1):
        # A part begins when the one before it leaves. XLA would make one product of all parts
        # otherwise (for an H100), and nothing would be left to do beside a hop.
        total, x, index = lax.optimization_barrier((total, x, index))
        index = lax.rem(index + jnp.int32(n - 1), jnp.int32(n))
        total = lax.ppermute(total, axes, onward) + part(x, index)
    return total
