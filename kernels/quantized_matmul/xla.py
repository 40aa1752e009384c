"""A product with a quantized weight in plain JAX.

The whole weight is converted to floating point and multiplied; where one scale serves a column, the
scale multiplies the result instead, so that a compiler for TPUs or GPUs can convert the values
while it reads them. A CPU writes the converted weight to memory at each call: XLA's own product of
int8 weights with floating activations was measured at 0.6 to 40 GFLOP/s there, its float32 one at
20 to 66 (2 cores, jax 0.12). Its int8 x int8 -> int32 gave 66 to 217 from 8 tokens on: where 8-bit
activations are accurate enough, they are the fast way on a CPU. Formula: `api.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize, unpack


def quantized_matmul(
    x,  # [T, D]
    weight: QuantArray,  # [D, F]
    *,
    x_scale,  # [T, 1] or None
    out_dtype,
):
    if x_scale is not None:
        out = _by_groups(x, weight) * x_scale
    elif weight.num_groups == 1 and weight.zeros is None:
        out = _product(x, _centred(weight).astype(x.dtype)) * weight.scales.astype(jnp.float32)
    else:
        out = _product(x, dequantize(weight, x.dtype))
    return out.astype(out_dtype)


def _product(x, w):
    """Return [T, D] @ [D, F], in int32 for integers and in float32 for others."""
    is_integer, T = jnp.issubdtype(x.dtype, jnp.integer), x.shape[0]
    if T == 1 and is_integer and platform() == "cpu":
        # XLA on CPU is slow with one row of int8: 0.76 ms at D = 1024, F = 4096, two rows 0.22
        # (2 cores, jax 0.10.2, November 2026).
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return jax.lax.dot(
        x,
        w,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if is_integer else jnp.float32,
    )[:T]


def _centred(weight: QuantArray):
    """Return the values [D, F], less their middle where there are no zeros: int8 or float8."""
    if weight.bits == 8:
        return weight.values
    values = unpack(weight.values, weight.pack_rows).astype(jnp.int8)
    return values - weight.middle if weight.zeros is None else values


def _by_groups(x, weight: QuantArray):
    """Return the sums of each group, made in the type of its values, then scaled: float32 [T, F].

    One group at a time, since all at once would take num_groups x T x F numbers.
    """
    T = x.shape[0]
    groups, F = weight.num_groups, weight.num_columns
    x = x.reshape(T, groups, weight.group_size).swapaxes(0, 1)  # [groups, T, group_size]
    values = _centred(weight).reshape(groups, weight.group_size, F)
    scales = weight.scales.astype(jnp.float32)
    zeros = None if weight.zeros is None else weight.zeros.astype(jnp.float32)

    def group_sums(x, values, scale, zero):
        sums = _product(x, values).astype(jnp.float32)
        if zero is not None:
            sums -= zero * x.sum(axis=1, keepdims=True, dtype=jnp.int32).astype(jnp.float32)
        return sums * scale

    if groups == 1:
        return group_sums(x[0], values[0], scales[0], None if zeros is None else zeros[0])
    add = lambda total, group: (total + group_sums(*group), None)
    total, _ = jax.lax.scan(add, jnp.zeros((T, F), jnp.float32), (x, values, scales, zeros))
    return total


def quantize_activations(
    x,  # [T, D]
    dtype,
    largest: float,
):
    wide = x.astype(jnp.float32)
    top = abs(wide).max(axis=1, keepdims=True)
    scale = jnp.where(top == 0, 1, top / largest)
    values = wide / scale
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.rint(values)
    return jnp.clip(values, -largest, largest).astype(dtype), scale
