"""The gated half of a feed-forward layer, the obvious way: two products, one after the other.

Computes in float64 where JAX has it switched on, float32 otherwise. Formula: `api.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize


def gated_mlp(
    x,  # [T, D]
    gate_up,  # [2, D, F]
    *,
    activation,
    bias,  # [2, F] or None
):
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    if isinstance(gate_up, QuantArray):
        gate_up = dequantize(gate_up, wide)

    def product(half):
        out = jnp.matmul(
            x.astype(wide), gate_up[half].astype(wide), precision=jax.lax.Precision.HIGHEST
        )
        return out if bias is None else out + bias[half].astype(wide)

    return (ACTIVATIONS[activation](product(0)) * product(1)).astype(x.dtype)
