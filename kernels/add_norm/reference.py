"""Residual sum and norm, the obvious way. Formula: `api.py`.

Computes in float64 where JAX has it switched on, float32 otherwise; rounds where the formula does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.add_norm.options import NormOptions
from jaxinfer.kernels.kv_pages import QUANTIZED


def add_norm(
    x,  # [T, D]
    residual,  # [T, D] or None
    weight,  # [D]
    bias,  # [D] or None
    options: NormOptions,
):
    """Return (normed, sum)."""
    eps, offset, is_centred, quantize = options
    float_type = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    wide = lambda array: array.astype(float_type)
    total = x if residual is None else (wide(x) + wide(residual)).astype(x.dtype)
    centred = wide(total)
    if is_centred:
        centred = centred - jnp.mean(centred, axis=-1, keepdims=True)
    normed = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + eps)
    if is_centred:
        normed = normed * wide(weight) + (0 if bias is None else wide(bias))
    elif offset:
        normed = normed * (offset + wide(weight))
    else:
        normed = wide(normed.astype(x.dtype)) * wide(weight)
    normed = normed.astype(x.dtype)
    if quantize is None:
        return normed, total
    largest = QUANTIZED[quantize]
    amax = jnp.max(jnp.abs(wide(normed)), axis=-1, keepdims=True)
    scales = jnp.where(amax > 0, amax / largest, 1)
    values = jnp.clip(wide(normed) / scales, -largest, largest)
    values = jnp.rint(values) if quantize == "int8" else values
    return (values.astype(quantize), scales.astype(jnp.float32)), total
