"""Which device of a ring has which tokens of a step.

The T tokens of a step, as they lie, are cut into 2n blocks; of n devices, device i has blocks i and
2n - 1 - i (Llama 3, arXiv:2407.21783, section 3.3.2). A token sees those before it, so that an
early block is little work and a late one much; such pairs are all the same. Where 2n does not
divide T, tokens of no row are put behind.

Steps of few tokens are not cut: every device has all of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sharding.rules import Layout

# So many tokens take a device no longer than one: below about 240 (v5e; 300 on an H100) a product
# waits for its weights, and those are the same on all devices of a ring.
MAX_TOGETHER = 256


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """Of `num_tokens` over `count` devices of a mesh axis; a count of 1: every device has all, and
    what this makes of arrays are the arrays themselves. To be asked inside `shard_map`."""

    num_tokens: int
    count: int = 1
    axis: str = ""

    @classmethod
    def of(cls, layout: Layout, num_tokens: int) -> TokenSplit:
        axes = layout.axes("cell")
        if not axes or num_tokens <= MAX_TOGETHER:
            return cls(num_tokens)
        [axis] = axes
        return cls(num_tokens, layout.size(axis), axis)

    @property
    def block_len(self) -> int:
        return -(-self.num_tokens // (2 * self.count))

    @property
    def num_own(self) -> int:
        """Tokens on one device."""
        return self.num_tokens if self.count == 1 else 2 * self.block_len

    def starts(self, device: jax.Array | int) -> jax.Array:
        """Where the two blocks of a device begin in the step: int32 [2]."""
        pair = jnp.stack([jnp.int32(device), 2 * self.count - 1 - jnp.int32(device)])
        return pair * self.block_len

    def indices(self, device: jax.Array | int | None = None) -> jax.Array:
        """Which of the step's tokens a device has (None: this one), in its own order: int32
        [num_own]; those from `num_tokens` on stand for none."""
        if self.count == 1:
            return jnp.arange(self.num_tokens, dtype=jnp.int32)
        starts = self.starts(lax.axis_index(self.axis) if device is None else device)
        within = jnp.arange(self.block_len, dtype=jnp.int32)
        return (starts[:, None] + within).reshape(-1)

    def own(self, x: jax.Array) -> jax.Array:
        """This device's part of an array [T, ...] that every device has; zeros for no token."""
        if self.count == 1:
            return x
        return x.at[self.indices()].get(mode="fill", fill_value=0)

    def all(self, x: jax.Array) -> jax.Array:
        """The array [T, ...] of which `x` is this device's part, on every device."""
        if self.count == 1:
            return x
        blocks = lax.all_gather(x.reshape(2, self.block_len, *x.shape[1:]), self.axis)
        in_order = jnp.concatenate([blocks[:, 0], blocks[::-1, 1]])
        return in_order.reshape(-1, *x.shape[1:])[: self.num_tokens]

    def at(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Tokens `index` [R] of the step, of the array of which `x` is this device's part: [R, ...]
        on every device."""
        if self.count == 1:
            return x[index]
        block, within = index // self.block_len, index % self.block_len
        is_late = block >= self.count
        device = jnp.where(is_late, 2 * self.count - 1 - block, block)
        is_own = device == lax.axis_index(self.axis)
        found = x[jnp.where(is_late, self.block_len + within, within)]
        is_own = is_own.reshape(-1, *(1 for _ in x.shape[1:]))
        return lax.psum(jnp.where(is_own, found, 0), self.axis)
