"""What the devices of a mesh say to each other, inside `shard_map`.

Each takes the mesh axes concerned, outermost first; without any it does nothing, so that callers
need not ask whether there is anyone to talk to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def rank(axes: Axes) -> jax.Array | int:
    """Which part of what is split over `axes` this device holds; the first axis counts most."""
    return lax.axis_index(axes) if axes else 0


def all_sum(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def all_sum_in_order(x: jax.Array, axes: Axes) -> jax.Array:
    """`all_sum`, of any number of devices with the same bits wherever in x a number stands: each
    is summed in the order of the ranks, in float32, where a ring begins at a device that depends on
    the place. A device sends (n - 1) times x, where `all_sum` sends 2 (n - 1) / n of it."""
    if not axes:
        return x
    parts = lax.all_gather(x, axes).astype(jnp.float32)  # [n, ...]
    total = parts[0]
    for i in range(1, len(parts)):
        total = total + parts[i]
    return total.astype(x.dtype)


def all_max(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.pmax(x, axes) if axes else x


def all_gather(x: jax.Array, axes: Axes, *, dim: int) -> jax.Array:
    """The parts of all devices, joined along `dim` in the order of their ranks."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def own_part(x: jax.Array, axes: Axes, parts: int, *, dim: int) -> jax.Array:
    """This device's part of an array that every device holds whole."""
    if not axes:
        return x
    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, rank(axes) * jnp.int32(size), size, dim)
