"""A product with a quantized weight, the obvious way: the whole weight, then one product.

Computes in float64 where JAX has it switched on, float32 otherwise. Formula: `api.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize


def quantized_matmul(
    x,  # [T, D]
    weight: QuantArray,  # [D, F]
    *,
    x_scale,  # [T, 1] or None
    out_dtype,
):
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    x = x.astype(wide)
    if x_scale is not None:
        x = x * x_scale.astype(wide)
    w = dequantize(weight, wide)
    return jnp.dot(x, w, precision=jax.lax.Precision.HIGHEST).astype(out_dtype)
