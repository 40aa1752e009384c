"""Paged attention, the obvious way: gather each row's whole table, one dense softmax a token.

Computes in float64 where JAX has it switched on, float32 otherwise. Cost: T x W x B whatever the
lengths are. Formula: `api.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.kv_pages import KVPages, dequantized
from jaxinfer.kernels.paged_attention.page_part import WHOLE, PagePart
from jaxinfer.kernels.paged_attention.rows import RaggedRows


def paged_attention(
    q,  # [T, N, H]
    rows: RaggedRows,
    pages: KVPages,  # k, v: [P, K, B, H]
    variant: AttentionVariant,
    *,
    part: PagePart = WHOLE,
    return_lse: bool = False,
):
    """Return (out [T, N, H or value_dim], lse [T, N] or None)."""
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    T, N, H = q.shape
    K, B = pages.k.shape[1:3]
    G, (R, W) = N // K, rows.page_table.shape
    scale, window, soft_cap = variant.scale, variant.window, variant.soft_cap
    sinks, alibi_slopes = variant.sinks, variant.alibi_slopes
    row, position, is_real = _positions(T, rows)

    def gathered(stored):  # [R, W, K, B, H] -> [T, W*B, K, H]
        by_row = jnp.moveaxis(stored[rows.page_table], 2, 3).reshape(R, -1, K, H)
        return by_row[row].astype(wide)

    s = part.positions(jnp.arange(W * B), B)[None]  # [1, W*B]
    last_seen = position
    if rows.key_limit is not None:
        last_seen = jnp.minimum(position, rows.key_limit[row] - 1)
    is_seen = (s <= last_seen[:, None]) & is_real[:, None]
    if window is not None:
        is_seen &= s > position[:, None] - window
    k = jnp.where(is_seen[..., None, None], gathered(dequantized(pages.k, pages.k_scales)), 0)
    v = k[..., : variant.value_dim]
    if pages.v is not None:
        v = jnp.where(is_seen[..., None, None], gathered(dequantized(pages.v, pages.v_scales)), 0)

    z = jnp.einsum("tkgh,tskh->tkgs", q.astype(wide).reshape(T, K, G, H), k).reshape(T, N, -1)
    z = z * scale
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    if alibi_slopes is not None:
        z = z + alibi_slopes.astype(wide)[None, :, None] * (s - position[:, None])[:, None]
    z = jnp.where(is_seen[:, None], z, -jnp.inf)
    top = jnp.max(z, axis=-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(wide)[None, :, None])
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight = jnp.exp(z - top)  # [T, N, W*B]
    total = weight.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(wide)[None, :, None] - top)
    weight = weight / jnp.where(total == 0, 1, total)
    out = jnp.einsum("tkgs,tskh->tkgh", weight.reshape(T, K, G, -1), v)
    lse = (top + jnp.log(total))[..., 0].astype(jnp.float32)
    lse = jnp.where(is_real[:, None], lse, -jnp.inf)
    return out.reshape(T, N, -1).astype(q.dtype), lse if return_lse else None


def _positions(T, rows: RaggedRows):
    """Return each token's row, its position there, and whether it has a row: [T] each."""
    token = jnp.arange(T)
    row = jnp.searchsorted(rows.q_start[1:], token, side="right", method="compare_all")
    is_real = row < rows.kv_len.shape[0]
    row = jnp.where(is_real, row, 0)
    return row, rows.kv_len[row] - (rows.q_start[row + 1] - token), is_real
