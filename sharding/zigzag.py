"""The assignment of a step's tokens to the devices of a ring (zigzag order).

The T tokens of a step are cut, in order, into 2n blocks; of n devices, device i has blocks i and
2n - 1 - i (Llama 3, arXiv:2407.21783, section 3.3.2). With causal attention an early block is
little work and a late one much; every such pair is the same amount. If 2n does not divide T, the
step is padded at the end.

Steps of few tokens are not split: every device has all of their tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sharding.rules import Layout

# Up to about 240 tokens (v5e; 300 on an H100) a product takes as long as reading its weights, which
# every device of the ring reads anyway: splitting so few tokens would save nothing.
MAX_UNSPLIT_TOKENS = 256


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """The split of `num_tokens` over `count` devices of a mesh axis.

    With a count of 1 every device has all tokens, and the methods return arrays unchanged. The
    methods must be called inside `shard_map`.
    """

    num_tokens: int
    count: int = 1
    axis: str = ""

    @classmethod
    def of(cls, layout: Layout, num_tokens: int) -> TokenSplit:
        axes = layout.axes("page_offset")
        if not axes or num_tokens <= MAX_UNSPLIT_TOKENS:
            return cls(num_tokens)
        [axis] = axes
        return cls(num_tokens, layout.size(axis), axis)

    @property
    def block_len(self) -> int:
        return -(-self.num_tokens // (2 * self.count))

    @property
    def num_local(self) -> int:
        """The number of tokens on one device, padding included."""
        return self.num_tokens if self.count == 1 else 2 * self.block_len

    def starts(self, device: jax.Array | int) -> jax.Array:
        """Return where the two blocks of a device begin in the step: int32 [2]."""
        pair = jnp.stack([jnp.int32(device), 2 * self.count - 1 - jnp.int32(device)])
        return pair * self.block_len

    def indices(self, device: jax.Array | int | None = None) -> jax.Array:
        """Return the indices in the step of a device's tokens, in local order: int32 [num_local].

        None means this device. Indices from `num_tokens` on are padding.
        """
        if self.count == 1:
            return jnp.arange(self.num_tokens, dtype=jnp.int32)
        starts = self.starts(lax.axis_index(self.axis) if device is None else device)
        within = jnp.arange(self.block_len, dtype=jnp.int32)
        return (starts[:, None] + within).reshape(-1)

    def shard(self, x: jax.Array) -> jax.Array:
        """Return this device's part of a replicated array [T, ...]; zeros for padding."""
        if self.count == 1:
            return x
        return x.at[self.indices()].get(mode="fill", fill_value=0)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the whole array [T, ...] of which `x` is this device's part."""
        if self.count == 1:
            return x
        blocks = lax.all_gather(x.reshape(2, self.block_len, *x.shape[1:]), self.axis)
        in_order = jnp.concatenate([blocks[:, 0], blocks[::-1, 1]])
        return in_order.reshape(-1, *x.shape[1:])[: self.num_tokens]

    def take(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Return the tokens `index` [R] of the step as [R, ...] on every device.

        `x` is this device's part of the array.
        """
        if self.count == 1:
            return x[index]
        block, within = index // self.block_len, index % self.block_len
        is_late = block >= self.count
        device = jnp.where(is_late, 2 * self.count - 1 - block, block)
        is_local = device == lax.axis_index(self.axis)
        values = x[jnp.where(is_late, self.block_len + within, within)]
        is_local = is_local.reshape(-1, *(1 for _ in x.shape[1:]))
        return lax.psum(jnp.where(is_local, values, 0), self.axis)
