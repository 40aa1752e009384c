"""Rotary embedding and cache write, the obvious way. Formula: `api.py`.

Rotates in float64 where JAX has it switched on, in float32 otherwise. Folded pages are unfolded,
written and folded again: the whole pool is copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.folding import fold_of, unfold
from jaxinfer.kernels.kv_pages import KVPages, NewTokens, quantize_heads, scale_offset
from jaxinfer.kernels.rotary import Rotary


def rope_and_write(
    q,  # [T, N, H]
    new: NewTokens,
    rotary: Rotary | None,
    pages: KVPages,  # k, v: [P, K, B, H] or folded
):
    """Return (rotated queries, pages)."""
    k = new.k
    if rotary is not None:
        q, k = _rotated(q, *rotary), _rotated(k, *rotary)
    keys, k_scales = _stored(pages.k, pages.k_scales, k, new)
    if pages.v is None:
        return q, KVPages(keys, None, k_scales)
    values, v_scales = _stored(pages.v, pages.v_scales, new.v, new)
    return q, KVPages(keys, values, k_scales, v_scales)


def _rotated(x, cos, sin):
    float_type = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    half = cos.shape[1]
    cos, sin = cos[:, None].astype(float_type), sin[:, None].astype(float_type)
    wide = x.astype(float_type)
    a, b, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)


def _stored(pages, scales, numbers, new: NewTokens):
    P, K, rows, lanes = pages.shape
    H = numbers.shape[2]
    fold = fold_of(lanes, H)
    if scales is None:
        numbers = numbers.astype(pages.dtype)
    else:
        numbers, scale = quantize_heads(numbers, pages.dtype)
        at = scale_offset(new.offset, rows, fold)
        scales = scales.at[new.page, :, at].set(scale, mode="drop")
    plain = unfold(pages, H).at[new.page, :, new.offset].set(numbers, mode="drop")
    folded = plain.reshape(P, K, rows, fold * H)
    return jnp.pad(folded, [(0, 0)] * 3 + [(0, lanes - fold * H)]), scales
