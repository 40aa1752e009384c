"""What the parts of the TPU kernel share: its plan, its memory, an item of its work."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.lax import div  # `//` rounds down, which costs more and queries the device

# Page ids come to SMEM this many at a time: the smallest slice of HBM that Mosaic lets a DMA take.
IDS = 128

# Tokens transposed together, and tokens of a result that go to HBM in one DMA: the rows of a tile
# of bfloat16.
TOKEN_RUN = 16

# A finite stand-in for -inf. A row that has seen nothing yet gathers weights exp(0); the first
# position it does see fades them by exp(MASKED - top) = 0. Rows that never see any are not stored.
MASKED = -1e30

# Fields of an item, in the order `items` holds them.
ROW, FIRST, COUNT, POSITION, BLOCK, END_BLOCK, NEW, GROUP, EDGE_PAGE = range(9)


class TpuPagedPlan(NamedTuple):
    """What a kernel is compiled for."""

    num_kv_heads: int  # K
    group: int  # G
    fold: int  # tokens in a row of lanes
    head_dim: int  # H
    page_rows: int  # rows of lanes in a page: B / fold
    pages_a_block: int
    tile: int  # M
    slots: int
    num_items: int
    ids_a_row: int  # slices of IDS page ids in a row of the table
    scale: float
    window: int | None
    soft_cap: float | None
    compute: Any  # dtype of the operands of both products
    has_sinks: bool = False
    has_slopes: bool = False
    has_scales: bool = False  # the pages are quantized
    has_lse: bool = False
    group_rows: int = 0  # rows of lanes stored together; 0: nothing is stored

    @property
    def is_update(self) -> bool:
        """Whether the kernel stores the step's new keys and values."""
        return self.group_rows > 0

    @property
    def num_fields(self) -> int:
        return EDGE_PAGE + 1 if self.is_update else END_BLOCK + 1

    @property
    def absent(self) -> set[str]:
        """The fields of `TpuRefs` that a call of this plan lacks."""
        parts = {
            "sinks": self.has_sinks,
            "slopes row_slopes": self.has_slopes,
            "k_scales v_scales k_factors v_factors": self.has_scales,
            "lse lse_tile": self.has_lse,
            "k_groups v_groups k_stored v_stored k_edge v_edge": self.is_update,
            "k_write v_write edge_sem group_sem": self.is_update,
        }
        return {name for names, has in parts.items() if not has for name in names.split()}

    @property
    def group_len(self) -> int:
        """Tokens of a group of rows that are stored together."""
        return self.group_rows * self.fold

    @property
    def copies(self) -> int:
        """Rows of a product for one token: Y."""
        return self.fold * self.group

    def rows_at_once(self, tokens: int) -> int:
        """Return the number of rows in one product, a divisor of all.

        Loops over products replace long straight code: a layer's kernel took 3 s to compile and
        1 MB without them.
        """
        rows = self.copies * tokens
        if tokens == 1:
            return rows
        return TOKEN_RUN * max(d for d in range(1, 9) if rows // TOKEN_RUN % d == 0)

    @property
    def page_size(self) -> int:
        return self.page_rows * self.fold

    @property
    def block_rows(self) -> int:
        return self.pages_a_block * self.page_rows

    @property
    def block_len(self) -> int:
        return self.pages_a_block * self.page_size


class TpuRefs(NamedTuple):
    """The kernel's memory. X is `fold` * N, Y is `fold` * G, L the lanes of a page's row, Z those
    that hold N numbers, A `group_rows`. What a plan lacks (`TpuPagedPlan.absent`) is None."""

    items: Any  # SMEM [num_fields * num_items]
    core_first: Any  # SMEM [cores]: each core's first item
    core_steps: Any  # SMEM [cores]: and its number of blocks
    table: Any  # HBM [R * ids_a_row, 1, IDS]
    q: Any  # HBM [T, X, L]
    k_pages: Any  # HBM [P, K, page_rows, L]
    v_pages: Any  # HBM [P, K, page_rows, L]
    k_scales: Any  # HBM [P, K, B]
    v_scales: Any  # HBM [P, K, B]
    k_groups: Any  # HBM [groups, K, A, L]: the step's new keys as they lie in pages
    v_groups: Any  # HBM [groups, K, A, L]
    sinks: Any  # VMEM [K, Y, 128]
    slopes: Any  # VMEM [K, Y, 128]
    out: Any  # HBM [T, N, L]
    lse: Any  # HBM [T, 1, Z]
    k_stored: Any  # HBM [P, K, page_rows, L]: the memory of k_pages
    v_stored: Any  # HBM [P, K, page_rows, L]
    ids: Any  # SMEM [2, 1, IDS]
    k: Any  # VMEM [slots, K, block_rows, L]
    v: Any  # VMEM [slots, K, block_rows, L]
    k_factors: Any  # VMEM [slots, pages_a_block, K, B]
    v_factors: Any  # VMEM [slots, pages_a_block, K, B]
    k_edge: Any  # VMEM [slots, K, A, L]
    v_edge: Any  # VMEM [slots, K, A, L]
    k_write: Any  # VMEM [2, K, A, L]
    v_write: Any  # VMEM [2, K, A, L]
    q_tile: Any  # VMEM [slots, M, X, L]
    q_rows: Any  # VMEM [K, Y * M, L]
    top: Any  # VMEM [K, Y * M, 128], equal in all lanes
    total: Any  # VMEM [K, Y * M, 128], equal in all lanes
    acc: Any  # VMEM [K, Y * M, L]
    row_slopes: Any  # VMEM [K, Y * M, 128]
    out_tile: Any  # VMEM [2, M, N, L]
    lse_tile: Any  # VMEM [2, M, 1, Z]
    ids_sem: Any  # [2]
    kv_sem: Any  # [slots]
    q_sem: Any  # [slots]
    out_sem: Any  # [2]
    edge_sem: Any  # [2]
    group_sem: Any  # [1]


class TpuItem(NamedTuple):
    """One run of queries; all fields are scalars."""

    index: Any
    row: Any
    first: Any  # its first token
    count: Any  # its number of tokens
    position: Any  # that of its first token
    block: Any  # the first block that it sees
    end_block: Any  # the block after its last
    new: Any = None  # position of the row's first token that this step stores
    group: Any = None  # the group of k_groups with that token
    edge_page: Any = None  # the page with that token

    @property
    def end(self):
        """The position after its last token."""
        return self.position + self.count


def guard(condition, action) -> None:
    pl.when(condition)(action)


def tile_start(plan: TpuPagedPlan, r: TpuRefs, item: TpuItem):
    """Return the token from which M queries are read: the last tile may not reach past the end."""
    return jnp.minimum(item.first, r.q.shape[0] - plan.tile)


def page_range(plan: TpuPagedPlan, item: TpuItem, block):
    """Return the first page of the block that the item sees, and the page after the last."""
    first, end = block * plan.pages_a_block, (block + 1) * plan.pages_a_block
    if plan.window is not None:
        oldest = jnp.maximum(item.position - plan.window + 1, 0)
        first = jnp.maximum(first, div(oldest, plan.page_size))
    last = item.position + item.count - 1
    return first, jnp.minimum(end, div(last, plan.page_size) + 1)
