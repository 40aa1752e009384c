"""Collectives over mesh axes, to be called inside `shard_map`.

Each takes mesh axes, outermost first. With no axes it is the identity, so that callers need not
distinguish one device from several.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def rank(axes: Axes) -> jax.Array | int:
    """Return the index of this device along `axes`; the first axis is the most significant."""
    return lax.axis_index(axes) if axes else 0


def all_sum(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the sum of x over all devices."""
    return lax.psum(x, axes) if axes else x


def all_sum_in_order(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the sum of x over all devices; its bits do not depend on the position within x.

    Every element is summed in rank order, in float32. A ring all-reduce instead starts the sum of
    an element at a device that depends on its position. Each device sends (n - 1) times the bytes
    of x, where `all_sum` sends 2 (n - 1) / n times.
    """
    if not axes:
        return x
    parts = lax.all_gather(x, axes).astype(jnp.float32)  # [n, ...]
    total = parts[0]
    for i in range(1, len(parts)):
        total = total + parts[i]
    return total.astype(x.dtype)


def all_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the maximum of x over all devices."""
    return lax.pmax(x, axes) if axes else x


def all_gather(x: jax.Array, axes: Axes, *, dim: int) -> jax.Array:
    """Concatenate the shards of all devices along `dim`, in rank order."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def local_shard(x: jax.Array, axes: Axes, num_shards: int, *, dim: int) -> jax.Array:
    """Return this device's shard, along `dim`, of an array that is replicated over `axes`."""
    if not axes:
        return x
    size = x.shape[dim] // num_shards
    return lax.dynamic_slice_in_dim(x, rank(axes) * jnp.int32(size), size, dim)
