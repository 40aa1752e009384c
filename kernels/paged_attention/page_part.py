"""Pages that are split over devices by offset: which tokens lie in the part that a device has.

Part `index` of `count` of a page of B tokens is offsets [index * b, (index + 1) * b), b = B /
count. The tokens of a row in a part, in the order of its page table, are its *local* tokens 0, 1,
...
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class PagePart(NamedTuple):
    """`index` may be traced (a device's rank), `count` is static. `WHOLE` is all of a page."""

    index: Any
    count: int

    def positions(self, local: jax.Array, part_size: int) -> jax.Array:
        """Return the positions of local tokens in their row; `part_size` is b."""
        if self.count == 1:
            return local
        return (local // part_size * self.count + self.index) * part_size + local % part_size

    def num_keys(self, last: jax.Array, part_size: int) -> jax.Array:
        """Return how many local tokens have positions up to `last`; 0 for -1 and below."""
        last = jnp.maximum(last, -1)
        if self.count == 1:
            return last + 1
        page, offset = last // (part_size * self.count), last % (part_size * self.count)
        return page * part_size + jnp.clip(offset + 1 - self.index * part_size, 0, part_size)

    def holds(self, position: jax.Array, part_size: int) -> jax.Array:
        """Return whether the token at that position is in this part."""
        return position // part_size % self.count == self.index


WHOLE = PagePart(0, 1)
