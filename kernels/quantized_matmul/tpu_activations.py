"""Quantizing activations on TPUs: one pass over x, whole tokens at a time. Formula: `api.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.tpu_chips import MEBI

TILE_BYTES = 2 * MEBI  # bytes of a tile of tokens in float32
CONVERTS_FLOAT8 = ("TPU7",)  # chips that convert float32 to float8, by the beginning of their names


def quantize_activations(
    x,  # [T, D]
    dtype: Any,
    largest: float,
    *,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return (values, scales). Declines (`NotImplementedError`) what Mosaic cannot compile."""
    T, D = x.shape
    if not interpret and x.dtype == jnp.float16:
        raise NotImplementedError("Mosaic loads no float16; use bfloat16 or float32")
    if not (interpret or dtype == jnp.int8 or device_kind().startswith(CONVERTS_FLOAT8)):
        raise NotImplementedError(f"{device_kind()} makes no float8 of float32 in a kernel")
    tokens = min(T, max(32, TILE_BYTES // (4 * D) // 32 * 32))
    if tokens * D * 4 > 4 * TILE_BYTES:
        raise NotImplementedError(f"32 tokens of {D} numbers leave no room in VMEM")
    by_tokens = lambda width: pl.BlockSpec((tokens, width), lambda t: (t, 0))
    return pl.pallas_call(
        partial(_kernel, largest),
        grid=(pl.cdiv(T, tokens),),
        in_specs=[by_tokens(D)],
        out_specs=[by_tokens(D), by_tokens(1)],
        out_shape=[jax.ShapeDtypeStruct((T, D), dtype), jax.ShapeDtypeStruct((T, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=16 * MEBI
        ),
        interpret=interpret,
        name="quantize_activations",
    )(x)


def _kernel(
    largest: float,
    x_ref,  # [tokens, D]
    values_ref,  # [tokens, D]
    scale_ref,  # [tokens, 1]
):
    x = x_ref[...].astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    scale = jnp.where(top == 0, 1.0, top / largest)
    values = x / scale
    if jnp.issubdtype(values_ref.dtype, jnp.integer):
        values = jnp.round(values)
    values_ref[...] = jnp.clip(values, -largest, largest).astype(values_ref.dtype)
    scale_ref[...] = scale
