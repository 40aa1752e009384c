"""Paged attention: the front door.

A step holds R rows (requests). Row r brings the query tokens `q[q_start[r]:q_start[r+1]]`; they are
the *last* `q_start[r+1] - q_start[r]` of its `kv_len[r]` tokens, so query i of the row stands at
position `kv_len[r] - q_len[r] + i`. Decodes (one query) and prefill chunks (many) share one call.
Row r's token at position p has its key and value in page `page_table[r, p // B]`, cell `p % B`.
(R1 in a signature is R + 1.)

For a query at position p of row r and head n (KV head n // G), over positions s of the row:

    z[s]  = scale * q . k[s]
    z[s]  = soft_cap * tanh(z[s] / soft_cap)  if soft_cap            (Gemma 2, arXiv:2408.00118)
    z[s] += alibi_slopes[n] * (s - p)         if alibi_slopes        (ALiBi, arXiv:2108.12409)
    z[s]  = -inf  unless  s <= p  and  s > p - window                (causal, sliding window)
    out   = sum_s exp(z[s]) v[s] / (sum_s exp(z[s]) + exp(sinks[n])) (gpt-oss; without sinks: 0)

Pages are [P, K, B, H] (rows = B, lanes = H) or folded, [P, K, B / f, L] with L a multiple of 128,
which suits a TPU where H is not one (`folding.py`).

Cells past `kv_len` and pages that no row owns may hold anything, NaN included; they never reach the
output. A token of no row (padding past `q_start[R]`) gets zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.paged_attention import reference, tpu, xla
from jaxinfer.kernels.paged_attention.folding import fold_of, unfolding, write_folded

BACKENDS = {
    "reference": unfolding(reference.paged_attention),
    "xla": unfolding(xla.paged_attention),
    "tpu": tpu.paged_attention,
}

INVARIANT_TILE = 16  # tokens computed together in batch-invariant mode


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K rows lanes"],
    v_pages: Float[Array, "P K rows lanes"],
    q_start: Int[Array, " R1"],
    kv_len: Int[Array, " R"],
    page_table: Int[Array, "R W"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Float[Array, "T N H"]:
    """Attend from every query to its row's cached tokens; formula and layout in the module's text.

    Products and sums are float32, the result has q's dtype. With `batch_invariant` a token's
    arithmetic is the same whatever chunk or batch it arrives in, bit for bit, at the price of
    working token by token. Raises `ValueError` for shapes that do not fit together.
    """
    _check_shapes(q, k_pages, v_pages, q_start, kv_len, page_table)
    _check_variant(q.shape[1], window, soft_cap, sinks, alibi_slopes)

    def attend(q, q_start, kv_len, page_table):
        return dispatch(
            "paged_attention",
            BACKENDS,
            backend,
            q,
            k_pages,
            v_pages,
            q_start,
            kv_len,
            page_table,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )

    if batch_invariant:
        return _token_by_token(attend, q, q_start, kv_len, page_table)
    return attend(q, q_start, kv_len, page_table)


def write_pages(
    pages: Float[Array, "P K rows lanes"],
    new: Float[Array, "T K H"],
    page: Int[Array, " T"],
    cell: Int[Array, " T"],
) -> Float[Array, "P K rows lanes"]:
    """Put `new[t]` into `cell[t]` of `page[t]`; a token whose page is P or more is dropped.

    In place when the caller's jit donates `pages`: the cost follows T, not the pool. Of folded
    pages, tokens of one page must lie one behind another in `new`, as a row's tokens do.
    """
    if pages.shape[3] != new.shape[2]:
        return write_folded(pages, new, page, cell)
    return pages.at[page, :, cell].set(new.astype(pages.dtype), mode="drop")


def token_rows(T: int, q_start: Int[Array, " R1"]) -> Int[Array, " T"]:
    """The row of every token; padding tokens get R."""
    return jnp.searchsorted(
        q_start[1:], jnp.arange(T, dtype=q_start.dtype), side="right", method="compare_all"
    ).astype(jnp.int32)


def _token_by_token(attend, q, q_start, kv_len, page_table):
    """`attend` with a row for each token, always `INVARIANT_TILE` of them at a time: [T, N, H].

    Rows of their own take a token's neighbours out of its sums; one size for every tile does the
    same for its code, since a compiler orders the sums of other sizes otherwise (XLA on CPU does).
    """
    T, M = q.shape[0], INVARIANT_TILE
    row = token_rows(T, q_start)
    is_real = row < kv_len.shape[0]
    row = jnp.where(is_real, row, 0)
    ends = kv_len[row] - (q_start[row + 1] - 1 - jnp.arange(T, dtype=q_start.dtype))

    def tiles(x):  # [T, ...] -> [T / M, M, ...]
        x = jnp.pad(x, ((0, -T % M), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, M, *x.shape[1:])

    def of_tile(tile):
        tile_q, tile_ends, tile_table = tile
        num_real = (tile_ends > 0).sum(dtype=q_start.dtype)  # they come first
        starts = jnp.minimum(jnp.arange(M + 1, dtype=q_start.dtype), num_real)
        return attend(tile_q, starts, tile_ends, tile_table)

    out = jax.lax.map(
        of_tile, (tiles(q), tiles(jnp.where(is_real, ends, 0)), tiles(page_table[row]))
    )
    return out.reshape(-1, *q.shape[1:])[:T]


def _check_shapes(q, k_pages, v_pages, q_start, kv_len, page_table) -> None:
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages {k_pages.shape} and v_pages {v_pages.shape} differ in shape")
    if not fold_of(k_pages.shape[3], q.shape[2]):
        raise ValueError(f"head dim of q is {q.shape[2]}, of the pages {k_pages.shape[3]}")
    if q.shape[1] % k_pages.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k_pages.shape[1]} KV heads")
    if not q_start.shape[0] - 1 == kv_len.shape[0] == page_table.shape[0]:
        raise ValueError(
            f"rows differ: q_start has {q_start.shape[0] - 1}, kv_len {kv_len.shape[0]}, "
            f"page_table {page_table.shape[0]}"
        )
    if not kv_len.shape[0]:
        raise ValueError("there are 0 rows; there must be at least 1 (an empty one has kv_len 0)")


def _check_variant(num_heads, window, soft_cap, sinks, alibi_slopes) -> None:
    for name, of_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if of_head is not None and of_head.shape != (num_heads,):
            raise ValueError(f"{name} has shape {of_head.shape}; it must be ({num_heads},)")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 (None: no window)")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap is {soft_cap}; it must be above 0 and finite (None: no cap)")
