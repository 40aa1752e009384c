"""Paged attention, the obvious way: gather each row's whole table, one dense softmax a token.

Computes in float64 where JAX has it switched on, float32 otherwise. Cost: T x W x B whatever the
lengths are. Formula: `api.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.kv_pages import dequantized
from jaxinfer.kernels.paged_attention.page_part import WHOLE


def paged_attention(
    q,  # [T, N, H]
    k_pages,  # [P, K, B, H]
    v_pages,  # [P, K, B, H] or None
    q_start,  # [R+1]
    kv_len,  # [R]
    page_table,  # [R, W]
    *,
    scale,
    window,
    soft_cap,
    sinks,  # [N] or None
    alibi_slopes,  # [N] or None
    k_scales=None,  # [P, K, B] or None
    v_scales=None,  # [P, K, B] or None
    value_dim=None,
    return_lse=False,
    part=WHOLE,
    key_limit=None,  # [R] or None
):
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    T, N, H = q.shape
    K, B = k_pages.shape[1:3]
    G = N // K
    row, position, is_real = _places(T, q_start, kv_len)

    def cells(pages):  # [R, W, K, B, H] -> [T, W*B, K, H]
        of_row = jnp.moveaxis(pages[page_table], 2, 3).reshape(page_table.shape[0], -1, K, H)
        return of_row[row].astype(wide)

    s = part.positions(jnp.arange(page_table.shape[1] * B), B)[None]  # [1, W*B]
    last_seen = position if key_limit is None else jnp.minimum(position, key_limit[row] - 1)
    is_seen = (s <= last_seen[:, None]) & is_real[:, None]
    if window is not None:
        is_seen &= s > position[:, None] - window
    k = jnp.where(is_seen[..., None, None], cells(dequantized(k_pages, k_scales)), 0)
    v = k[..., :value_dim]
    if v_pages is not None:
        v = jnp.where(is_seen[..., None, None], cells(dequantized(v_pages, v_scales)), 0)

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


def _places(T, q_start, kv_len):
    """Each token's row, its position there, and whether it is of any: [T] each."""
    token = jnp.arange(T)
    row = jnp.searchsorted(q_start[1:], token, side="right", method="compare_all")
    is_real = row < kv_len.shape[0]
    row = jnp.where(is_real, row, 0)
    return row, kv_len[row] - (q_start[row + 1] - token), is_real
