"""Paged attention: signature, formula, contract and checks.

A step holds R rows (requests). Row r brings the query tokens `q[q_start[r]:q_start[r+1]]`; they are
the *last* `q_start[r+1] - q_start[r]` of its `kv_len[r]` tokens, so query i of the row stands at
position `kv_len[r] - q_len[r] + i`. Decodes (one query) and prefill chunks (many) share one call.
The key and value of row r's token at position p are in page `page_table[r, p // B]` at offset
`p % B`. (R1 in a signature is R + 1.)

For a query at position p of row r and head n (KV head n // G), over positions s of the row:

    z[s]  = scale * q . k[s]
    z[s]  = soft_cap * tanh(z[s] / soft_cap)  if soft_cap            (Gemma 2, arXiv:2408.00118)
    z[s] += alibi_slopes[n] * (s - p)         if alibi_slopes        (ALiBi, arXiv:2108.12409)
    z[s]  = -inf  unless  s <= p  and  s > p - window                (causal, sliding window)
    total = sum_s exp(z[s]) + exp(sinks[n])                          (gpt-oss; without sinks: 0)
    out   = sum_s exp(z[s]) v[s] / total
    lse   = log(total)

With lse, results over disjoint parts of a row's keys are merged (arXiv:2310.01889).

Pages (`kernels/kv_pages.py`) are [P, K, B, H] (rows = B, lanes = H) or folded, [P, K, B / f, L]
with L a multiple of 128, which suits a TPU where H is not one (`kernels/folding.py`). In quantized
pages, k and v are the stored numbers times the scale of the token and head. Where there are no
pages of values, v[s] is the first `value_dim` numbers of k[s] (the absorbed form of multi-head
latent attention, arXiv:2405.04434, section 2.1.2).

Where each page is split over devices by offset, a call holds one part (`page_part.py`) and sees
the keys in it alone; merged over the parts, the results are those of whole pages. With `key_limit`
row r's keys at that position and later are not seen either, whatever the query's position is.

Offsets past `kv_len` and pages that no row owns may hold anything, NaN included; they never reach
the output. A token of no row (padding past `q_start[R]`) gets zeros, and an lse of -inf.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.batch_invariance import INVARIANT_TILE
from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.folding import fold_of, unfolding
from jaxinfer.kernels.kv_pages import KVPages, is_quantized
from jaxinfer.kernels.paged_attention import gpu, hopper, reference, tpu, xla
from jaxinfer.kernels.paged_attention.page_part import WHOLE, PagePart
from jaxinfer.kernels.paged_attention.rows import RaggedRows

# Each takes (q, rows, pages, variant, *, return_lse) and returns (out, lse or None).
BACKENDS = {
    "reference": unfolding(reference.paged_attention),
    "xla": unfolding(xla.paged_attention),
    "tpu": tpu.paged_attention,
    "gpu": unfolding(gpu.paged_attention),
    "hopper": unfolding(hopper.paged_attention),
}

# Backends that implement parts of pages and limits of keys. The others are given the keys that a
# token sees as a row of its own, up to so many tokens: each then reads its pages by itself.
PART_BACKENDS = ("reference", "xla")
MAX_ROWS_OF_PARTS = 256


def paged_attention(
    q: Float[Array, "T N H"],
    rows: RaggedRows,
    pages: KVPages,
    variant: AttentionVariant,
    *,
    part: PagePart = WHOLE,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Float[Array, "T N values"] | tuple[Float[Array, "T N values"], Float[Array, "T N"]]:
    """Attend from every query to its row's cached tokens; formula and layout in the module's text.

    Products and sums are float32, the result has q's dtype; with `return_lse` lse follows it, in
    float32. With `batch_invariant` a token's arithmetic is the same whatever chunk or batch it
    arrives in, bit for bit, at the price of working token by token. Raises `ValueError` for shapes
    that do not fit together and `NoBackendError` where every backend declines.
    """
    check_call(q, rows, pages, variant)
    is_split = part.count > 1 or rows.key_limit is not None
    backends = _backends(part if is_split else None, batch_invariant)

    def attend(q, rows):
        return dispatch(
            "paged_attention", backends, backend, q, rows, pages, variant, return_lse=return_lse
        )

    out, lse = _token_by_token(attend, q, rows) if batch_invariant else attend(q, rows)
    return (out, lse) if return_lse else out


def _backends(part: PagePart | None, batch_invariant: bool) -> dict[str, Any]:
    """Return the backends by name; with `part` they also take limits of keys."""
    backends: dict[str, Any] = dict(BACKENDS)
    if batch_invariant:  # where a row is cut among programs would depend on the other rows
        backends["gpu"] = partial(BACKENDS["gpu"], batch_invariant=True)
    if part is None:
        return backends
    native = lambda backend: partial(backend, part=part)
    by_token = lambda backend: partial(_one_row_a_token, backend, part)
    return {n: native(b) if n in PART_BACKENDS else by_token(b) for n, b in backends.items()}


def token_rows(T: int, q_start: Int[Array, " R1"]) -> Int[Array, " T"]:
    """Return the row of every token of a step; padding tokens get R."""
    return rows_at(jnp.arange(T, dtype=q_start.dtype), q_start)


def rows_at(index: Int[Array, " T"], q_start: Int[Array, " R1"]) -> Int[Array, " T"]:
    """Return the rows of tokens `index` of the step; R for tokens past the last row."""
    row = jnp.searchsorted(q_start[1:], index, side="right", method="compare_all")
    return row.astype(jnp.int32)


def _token_by_token(attend, q, rows: RaggedRows):
    """Call `attend` with a row for each token, always `INVARIANT_TILE` of them at a time.

    Rows of their own take a token's neighbours out of its sums; one size for every tile does the
    same for its code, since a compiler orders the sums of other sizes otherwise (XLA on CPU does).
    """
    T, M = q.shape[0], INVARIANT_TILE
    dtype = rows.q_start.dtype
    row, ends = _token_ends(T, rows)

    def tiles(x):  # [T, ...] -> [T / M, M, ...]
        x = jnp.pad(x, ((0, -T % M), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, M, *x.shape[1:])

    def attend_tile(tile):
        tile_q, tile_ends, tile_table, tile_limit = tile
        num_real = (tile_ends > 0).sum(dtype=dtype)  # they come first
        starts = jnp.minimum(jnp.arange(M + 1, dtype=dtype), num_real)
        return attend(tile_q, RaggedRows(starts, tile_ends, tile_table, tile_limit))

    limit = None if rows.key_limit is None else tiles(rows.key_limit[row])
    operands = (tiles(q), tiles(ends), tiles(rows.page_table[row]), limit)
    parts = jax.lax.map(attend_tile, operands)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:T], parts)


def _token_ends(T: int, rows: RaggedRows):
    """Return each token's row and the length of the row up to it; 0 for no row: [T] both."""
    row = token_rows(T, rows.q_start)
    is_real = row < rows.kv_len.shape[0]
    row = jnp.where(is_real, row, 0)
    length, end = rows.kv_len[row], rows.q_start[row + 1]
    ends = length - (end - 1 - jnp.arange(T, dtype=rows.q_start.dtype))
    return row, jnp.where(is_real, ends, 0)


def _one_row_a_token(
    backend, part: PagePart, q, rows: RaggedRows, pages: KVPages, variant: AttentionVariant,
    **options,
):  # fmt: skip
    """Run a backend of whole pages over parts of them: every token becomes a row.

    The row is as long as the number of keys that the token sees in this part, since in the order of
    the row's table they come first. Exact for decodes, and no slower. Declines
    (`NotImplementedError`) what looks at distances between positions, which such a row does not
    have, and steps of more than `MAX_ROWS_OF_PARTS` tokens: those of a chunk would each read all of
    its pages.
    """
    T, dtype = q.shape[0], rows.q_start.dtype
    if variant.window is not None or variant.alibi_slopes is not None:
        raise NotImplementedError("pages that are split over devices, with a window or ALiBi")
    if T > MAX_ROWS_OF_PARTS:
        raise NotImplementedError(
            f"pages that are split over devices, with {T} tokens; it takes {MAX_ROWS_OF_PARTS}"
        )
    row, ends = _token_ends(T, rows)
    is_real = (ends > 0)[:, None]
    if rows.key_limit is not None:
        ends = jnp.minimum(ends, rows.key_limit[row])
    part_size = pages.k.shape[2] * fold_of(pages.k.shape[3], q.shape[2])
    num_keys = part.num_keys(ends - 1, part_size).astype(rows.kv_len.dtype)
    starts = jnp.minimum(jnp.arange(T + 1, dtype=dtype), rows.q_start[-1])
    # A row of one token has a key: one that sees none here reads any, and the result is dropped.
    lengths, sees_any = jnp.maximum(num_keys, 1), (num_keys > 0)[:, None]
    own_rows = RaggedRows(starts, lengths, rows.page_table[row])
    out, lse = backend(q, own_rows, pages, variant, **options)
    nothing = -jnp.inf if variant.sinks is None else variant.sinks.astype(jnp.float32)
    nothing = jnp.where(is_real, nothing, -jnp.inf)
    lse = None if lse is None else jnp.where(sees_any, lse, nothing)
    return jnp.where(sees_any[..., None], out, 0), lse


def check_call(q, rows: RaggedRows, pages: KVPages, variant: AttentionVariant) -> None:
    """Raise `ValueError` for shapes that do not fit together and options out of range."""
    _check_pages(q, pages)
    _check_rows(rows)
    check_value_dim(pages, q.shape[2], variant.value_dim)
    variant.check(q.shape[1])


def _check_pages(q, pages: KVPages) -> None:
    k, v = pages.k, pages.v
    if v is not None and (k.shape != v.shape or k.dtype != v.dtype):
        raise ValueError(f"pages of k, {k.dtype}{k.shape}, and of v, {v.dtype}{v.shape}, differ")
    fold = fold_of(k.shape[3], q.shape[2])
    if not fold:
        raise ValueError(f"head dim of q is {q.shape[2]}, of the pages {k.shape[3]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
    expected = (*k.shape[:2], k.shape[2] * fold)
    for name, stored, scales in (("k_scales", k, pages.k_scales), ("v_scales", v, pages.v_scales)):
        if (stored is not None and is_quantized(k.dtype)) != (scales is not None):
            problem = f"need {name}" if scales is None else f"have no use for {name}"
            raise ValueError(f"pages of {k.dtype} {problem}")
        if scales is not None and scales.shape != expected:
            raise ValueError(
                f"{name} has shape {scales.shape}; of these pages it must be {expected}"
            )


def _check_rows(rows: RaggedRows) -> None:
    q_start, kv_len, page_table, key_limit = rows
    if not q_start.shape[0] - 1 == kv_len.shape[0] == page_table.shape[0]:
        raise ValueError(
            f"rows differ: q_start has {q_start.shape[0] - 1}, kv_len {kv_len.shape[0]}, "
            f"page_table {page_table.shape[0]}"
        )
    if not kv_len.shape[0]:
        raise ValueError("there are 0 rows; there must be at least 1 (an empty one has kv_len 0)")
    if key_limit is not None and key_limit.shape != kv_len.shape:
        raise ValueError(f"key_limit has shape {key_limit.shape}; it must be {kv_len.shape}")


def check_value_dim(pages: KVPages, head_dim: int, value_dim: int | None) -> None:
    """Raise `ValueError` unless pages without values come with the number of values in a key."""
    if (pages.v is None) != (value_dim is not None):
        has = "no values: say value_dim" if pages.v is None else "values: value_dim must be None"
        raise ValueError(f"value_dim is {value_dim}, and the pages have {has}")
    if value_dim is not None and not 1 <= value_dim <= head_dim:
        raise ValueError(f"value_dim is {value_dim}; keys of {head_dim} take 1 to {head_dim}")
