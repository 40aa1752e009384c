"""The KV cache on the device: pages, and the ragged batch that says where its tokens live.

Pages are preallocated, an array of keys a layer and mostly one of values (`kernels/kv_pages.py`).
Which request owns which page is the host's business (`pages.py`); here a page is a number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.folding import LANES, rows_and_lanes
from jaxinfer.kernels.kv_pages import KVPages, is_quantized
from jaxinfer.options import ConfigError
from jaxinfer.sharding.rules import ONE_DEVICE, Layout
from jaxinfer.sharding.sequence import Rows, has_cached, part_of_pages, places
from jaxinfer.sharding.zigzag import TokenSplit


class RaggedBatch(NamedTuple):
    """R rows of one or more tokens each, laid one after another in T tokens.

    Padding tokens stand behind `q_start[R]`; padding rows are empty (`kv_len` 0). Where the layout
    splits tokens (`sharding/zigzag.py`), fields of tokens are those of one device's; fields of rows
    are whole.
    """

    positions: Int[Array, " T"]
    rope_len: Int[Array, " T"]  # the sequence length that RoPE scalings look at (nn/rope.py)
    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]  # cached tokens of the row, this step's included
    page_table: Int[Array, "R W"]
    write_page: Int[Array, " T"]  # P or more: the token's keys and values are not stored (here)
    write_cell: Int[Array, " T"]  # of the device's part of a page
    write_from: Int[Array, " R"]  # positions before it are in shared pages already
    has_cached: Bool[Array, ""]  # whether a row had tokens before this step
    split: TokenSplit  # which of the step's tokens these are

    @property
    def rows(self) -> Rows:
        return Rows(*(getattr(self, name) for name in Rows._fields))


class CacheShape(NamedTuple):
    """What a model stores of a token: one key and one value of H numbers a KV head and layer; with
    `value_dim` one key alone, whose first so many numbers are the value."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None


def page_layout(page_size: int, head_dim: int) -> tuple[int, int]:
    """Rows and lanes of a page: B and H, but folded on a TPU whose lanes H would not fill."""
    return rows_and_lanes(page_size, head_dim) if platform() == "tpu" else (page_size, head_dim)


def cells_of_part(page_size: int, layout: Layout) -> int:
    """How many cells of a page one device has; `ConfigError` where they do not divide."""
    parts = layout.parts("cell")
    if page_size % parts:
        raise ConfigError(
            f"cache.page_size is {page_size}, which mesh.seq {parts} does not divide: each device "
            f"has as many cells of a page; take a multiple of {parts}"
        )
    return page_size // parts


def check_layout(page_size: int, dtype, parts: int = 1) -> None:
    """Raises `ConfigError` for pages, each over so many devices in `parts`, that the platform
    would copy at every step."""
    if platform() == "tpu" and is_quantized(dtype) and page_size % (LANES * parts):
        of_seq = f", over mesh.seq {parts}" if parts > 1 else ""
        raise ConfigError(
            f"cache.dtype is {jnp.dtype(dtype).name} and cache.page_size {page_size}{of_seq}: on a "
            f"TPU it must be a multiple of {LANES * parts}, or XLA lays out the pages' scales "
            "otherwise than the kernel reads them, and copies all of them in every layer"
        )


def allocate(cache: CacheShape, *, num_pages: int, page_size: int, dtype) -> tuple[KVPages, ...]:
    """Zeroed pages of every layer, with scales where the type is a quantized one."""
    shape = (num_pages, cache.num_kv_heads, *page_layout(page_size, cache.head_dim))
    scales = (num_pages, cache.num_kv_heads, page_size) if is_quantized(dtype) else None

    def layer() -> KVPages:
        stored = lambda: jnp.zeros(shape, dtype)
        factors = lambda: jnp.ones(scales, jnp.float32) if scales else None
        if cache.value_dim is not None:
            return KVPages(stored(), None, factors())
        return KVPages(stored(), stored(), factors(), factors())

    return tuple(layer() for _ in range(cache.num_layers))


def page_bytes(cache: CacheShape, *, page_size: int, dtype) -> int:
    """Bytes that one page takes over all layers: keys, values and their scales."""
    one = jax.eval_shape(lambda: allocate(cache, num_pages=1, page_size=page_size, dtype=dtype))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one))


def ragged_batch(
    T: int,
    q_start: Int[Array, " R1"],
    kv_len: Int[Array, " R"],
    page_table: Int[Array, "R W"],
    least_rope_len: Int[Array, " R"],
    write_from: Int[Array, " R"],
    *,
    page_size: int,
    num_pages: int,
    layout: Layout = ONE_DEVICE,
) -> RaggedBatch:
    """Derive the per-token fields. Tokens before position `write_from` of their row are read-only:
    their keys and values are in a shared page already. By a `layout` that splits sequences it is
    what one device needs, inside `shard_map`, and `page_size` what it has of a page."""
    rows = Rows(q_start, kv_len, page_table, write_from, has_cached(q_start, kv_len, layout))
    part = part_of_pages(layout)
    split = TokenSplit.of(layout, T)
    at = places(split.indices(), rows, part, cells=page_size, num_pages=num_pages)
    return RaggedBatch(
        positions=at.position,
        rope_len=jnp.maximum(least_rope_len[at.row], at.position + 1),
        write_page=at.page,
        write_cell=at.cell,
        split=split,
        **rows._asdict(),
    )
