"""Residual sum and norm in plain JAX, for XLA to fuse. Formula: `api.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.add_norm.options import NormOptions
from jaxinfer.kernels.kv_pages import quantize_heads


def add_norm(
    x,  # [T, D]
    residual,  # [T, D] or None
    weight,  # [D]
    bias,  # [D] or None
    options: NormOptions,
):
    """Return (normed, sum)."""
    eps, offset, is_centred, quantize = options
    total = x if residual is None else x + residual
    wide = total.astype(jnp.float32)
    if is_centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if is_centred:
        normed = scaled * weight.astype(jnp.float32)
        normed = normed if bias is None else normed + bias.astype(jnp.float32)
    elif offset:
        normed = scaled * (offset + weight.astype(jnp.float32))
    else:
        normed = scaled.astype(x.dtype) * weight
    normed = normed.astype(x.dtype)
    if quantize is None:
        return normed, total
    values, scales = quantize_heads(normed[:, None], quantize)
    return (values[:, 0], scales), total
