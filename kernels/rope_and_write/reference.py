"""Rotary embedding and cache write, the obvious way. Formula: `api.py`.

Turns in float64 where JAX has it switched on, float32 otherwise. Folded pages are unfolded, written
and folded again: the whole pool is copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.folding import fold_of, unfold
from jaxinfer.kernels.kv_pages import KVPages, quantize_heads, scale_cell


def rope_and_write(
    q,  # [T, N, H]
    k,  # [T, K, H]
    v,  # [T, K, H] or None
    cos,  # [T, half] or None
    sin,  # [T, half] or None
    pages,  # k, v: [P, K, B, H] or folded
    page,  # [T]
    cell,  # [T]
):
    if cos is not None:
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    of_keys = _stored(pages.k, pages.k_scales, k, page, cell)
    if pages.v is None:
        return q, KVPages(of_keys[0], None, of_keys[1])
    of_values = _stored(pages.v, pages.v_scales, v, page, cell)
    return q, KVPages(of_keys[0], of_values[0], of_keys[1], of_values[1])


def _turned(x, cos, sin):
    float_type = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    half = cos.shape[1]
    cos, sin = cos[:, None].astype(float_type), sin[:, None].astype(float_type)
    wide = x.astype(float_type)
    a, b, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)


def _stored(pages, scales, new, page, cell):
    P, K, rows, lanes = pages.shape
    H = new.shape[2]
    fold = fold_of(lanes, H)
    if scales is None:
        new = new.astype(pages.dtype)
    else:
        new, scale = quantize_heads(new, pages.dtype)
        scales = scales.at[page, :, scale_cell(cell, rows, fold)].set(scale, mode="drop")
    plain = unfold(pages, H).at[page, :, cell].set(new, mode="drop")
    folded = plain.reshape(P, K, rows, fold * H)
    return jnp.pad(folded, [(0, 0)] * 3 + [(0, lanes - fold * H)]), scales
