"""Pages that are split by their cells: which tokens lie in the part that a device holds.

Part `index` of `count` of a page of B cells is cells [index * b, (index + 1) * b), b = B / count. A
row's cells that a part holds, in the order of its page table, are its *local* tokens 0, 1, ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class PagePart(NamedTuple):
    """`index` may be traced (a device's rank), `count` is static. `WHOLE` is all of a page."""

    index: Any
    count: int

    def positions(self, local: jax.Array, cells: int) -> jax.Array:
        """Where local tokens stand in their row, of pages with so many cells in this part."""
        if self.count == 1:
            return local
        return (local // cells * self.count + self.index) * cells + local % cells

    def num_keys(self, last: jax.Array, cells: int) -> jax.Array:
        """How many local tokens stand at positions up to `last`; none of -1 and before."""
        last = jnp.maximum(last, -1)
        if self.count == 1:
            return last + 1
        page, cell = last // (cells * self.count), last % (cells * self.count)
        return page * cells + jnp.clip(cell + 1 - self.index * cells, 0, cells)

    def holds(self, position: jax.Array, cells: int) -> jax.Array:
        """Whether the cell of a token at that position is in this part."""
        return position // cells % self.count == self.index


WHOLE = PagePart(0, 1)
