"""The KV cache on the device: pages, and the ragged batch that says where its tokens live.

Pages are preallocated, an array of keys a layer and mostly one of values (`kernels/kv_pages.py`).
Which request owns which page is the host's business (`pages.py`); here a page is a number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.folding import LANES, rows_and_lanes
from jaxinfer.kernels.kv_pages import KVPages, is_quantized
from jaxinfer.kernels.paged_attention.api import token_rows
from jaxinfer.options import ConfigError


class RaggedBatch(NamedTuple):
    """R rows of one or more tokens each, laid one after another in T tokens.

    Padding tokens stand behind `q_start[R]`; padding rows are empty (`kv_len` 0).
    """

    positions: Int[Array, " T"]
    rope_len: Int[Array, " T"]  # the sequence length that RoPE scalings look at (nn/rope.py)
    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]  # cached tokens of the row, this step's included
    page_table: Int[Array, "R W"]
    write_page: Int[Array, " T"]  # P or more: the token's keys and values are not stored
    write_cell: Int[Array, " T"]


class CacheShape(NamedTuple):
    """What a model stores of a token: one key and one value of H numbers a KV head and layer; with
    `value_dim` one key alone, whose first so many numbers are the value."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None


def layout(page_size: int, head_dim: int) -> tuple[int, int]:
    """Rows and lanes of a page: B and H, but folded on a TPU whose lanes H would not fill."""
    return rows_and_lanes(page_size, head_dim) if platform() == "tpu" else (page_size, head_dim)


def check_layout(page_size: int, dtype) -> None:
    """Raises `ConfigError` for pages that the platform would copy at every step."""
    if platform() == "tpu" and is_quantized(dtype) and page_size % LANES:
        raise ConfigError(
            f"cache.dtype is {jnp.dtype(dtype).name} and cache.page_size {page_size}: on a TPU it "
            f"must be a multiple of {LANES}, or XLA lays out the pages' scales otherwise than the "
            "kernel reads them, and copies all of them in every layer"
        )


def allocate(cache: CacheShape, *, num_pages: int, page_size: int, dtype) -> tuple[KVPages, ...]:
    """Zeroed pages of every layer, with scales where the type is a quantized one."""
    shape = (num_pages, cache.num_kv_heads, *layout(page_size, cache.head_dim))
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
    prompt_len: Int[Array, " R"],
    write_from: Int[Array, " R"],
    *,
    page_size: int,
    num_pages: int,
) -> RaggedBatch:
    """Derive the per-token fields. Tokens before position `write_from` of their row are read-only:
    their keys and values are in a shared page already."""
    row = token_rows(T, q_start)
    is_real = row < kv_len.shape[0]
    row = jnp.where(is_real, row, 0)
    offset = jnp.arange(T, dtype=jnp.int32) - q_start[row + 1]  # negative: from the row's end
    positions = jnp.where(is_real, kv_len[row] + offset, 0)
    is_written = is_real & (positions >= write_from[row])
    page = page_table[row, positions // page_size]
    return RaggedBatch(
        positions=positions,
        rope_len=jnp.maximum(prompt_len[row], positions + 1),
        q_start=q_start,
        kv_len=kv_len,
        page_table=page_table,
        write_page=jnp.where(is_written, page, num_pages),
        write_cell=positions % page_size,
    )
