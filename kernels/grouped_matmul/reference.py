"""Grouped products, the obvious way: every row with every matrix.

Computes in float64 where JAX has it switched on, float32 otherwise. Cost: E times that of one
product of all rows. Formula: `api.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.grouped_matmul.weights import shape_of
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize


def grouped_matmul(
    x,  # [T, D]
    weights,  # [E, D, F]
    group_sizes,  # [E]
):
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])[:, None]

    def add_group(out, group):
        w, first, end = group
        w = dequantize(w, wide) if isinstance(w, QuantArray) else w.astype(wide)
        is_its = (row >= first) & (row < end)
        rows = jnp.where(is_its, x, 0).astype(wide)
        product = jnp.matmul(rows, w, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(is_its, product, out), None

    zeros = jnp.zeros((x.shape[0], shape_of(weights)[2]), wide)
    out, _ = jax.lax.scan(add_group, zeros, (weights, ends - group_sizes, ends))
    return out.astype(x.dtype)
