"""The KV cache on the device: pages, and the ragged batch that says where its tokens live.

Pages are preallocated, one array of keys and one of values a layer. Which request owns which page
is the host's business (`pages.py`); here a page is a number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.paged_attention import write_pages
from jaxinfer.kernels.paged_attention.api import token_rows
from jaxinfer.kernels.paged_attention.folding import rows_and_lanes


class LayerPages(NamedTuple):
    """One layer's cache: cell b of page p holds K heads of keys and of values.

    Rows and lanes are B and H, or folded (`layout`).
    """

    k: Float[Array, "P K rows lanes"]
    v: Float[Array, "P K rows lanes"]

    def write(self, k: jax.Array, v: jax.Array, batch: RaggedBatch) -> LayerPages:
        """Store the step's new keys and values [T, K, H]; in place under donation."""
        return LayerPages(
            write_pages(self.k, k, batch.write_page, batch.write_cell),
            write_pages(self.v, v, batch.write_page, batch.write_cell),
        )


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


def layout(page_size: int, head_dim: int) -> tuple[int, int]:
    """Rows and lanes of a page: B and H, but folded on a TPU whose lanes H would not fill."""
    return rows_and_lanes(page_size, head_dim) if platform() == "tpu" else (page_size, head_dim)


def allocate(
    num_layers: int, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype
) -> tuple[LayerPages, ...]:
    """`num_layers` layers of zeroed pages."""
    shape = (num_pages, num_kv_heads, *layout(page_size, head_dim))
    return tuple(
        LayerPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )


def page_bytes(
    num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype
) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    rows, lanes = layout(page_size, head_dim)
    return 2 * num_layers * num_kv_heads * rows * lanes * jnp.dtype(dtype).itemsize


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
