"""Residual sum and norm on TPUs: one Pallas (Mosaic) kernel over blocks of whole tokens.

Formula and contract: `api.py`. XLA makes three loops of the same, five with int8 (2048 tokens of
4096 compiled for a v5e, jax 0.10.2), each of which goes over the sum; here it is read once.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.add_norm.options import NormOptions
from jaxinfer.kernels.kv_pages import QUANTIZED
from jaxinfer.kernels.tpu_chips import MEBI
from jaxinfer.kernels.tuning import tuned

SUBLANES = 32  # rows of a tile of 8-bit numbers; 16-bit ones have 16, 32-bit ones 8
MAX_VMEM = 12 * MEBI  # for a block's buffers: the smallest chip (v4) has 16 MiB in all


@dataclasses.dataclass(frozen=True)
class TpuNormTiling:
    """How a call is divided: tokens of a block, a multiple of `SUBLANES`."""

    rows: int

    def __post_init__(self):
        if self.rows < 1 or self.rows % SUBLANES:
            raise ValueError(f"rows is {self.rows}; it must be a multiple of {SUBLANES}")


def heuristic(x) -> TpuNormTiling:
    """Return a tiling with blocks of about 1 MiB in float32: a DMA of 512 KiB takes longer than its
    latency, and both buffers of four arrays with the float32 numbers leave half of a v4's VMEM."""
    rows = MEBI // (4 * x.shape[1])
    most = -(-x.shape[0] // SUBLANES) * SUBLANES
    return TpuNormTiling(min(most, max(SUBLANES, rows // SUBLANES * SUBLANES)))


def candidates(x, *_arguments, **_options) -> list[TpuNormTiling]:
    """Return the tilings worth measuring for an operator's abstract arguments."""
    tilings = [TpuNormTiling(SUBLANES << power) for power in range(5)]
    most = max(SUBLANES, x.shape[0])
    fitting = [t for t in tilings if t.rows <= most and vmem_bytes(t, x) <= MAX_VMEM]
    return list(dict.fromkeys([heuristic(x), *fitting]))


def tiling_key(x, *_arguments, quantize: str | None = None, **_options) -> str:
    """Return the key of a measured tiling: tokens, numbers of a token, types."""
    return f"T={x.shape[0]} D={x.shape[1]} {x.dtype} {quantize}"


def vmem_bytes(tiling: TpuNormTiling, x) -> int:
    """Return the bytes of two buffers of two inputs and two outputs, and of two float32 blocks."""
    return tiling.rows * x.shape[1] * (8 * x.dtype.itemsize + 8)


def add_norm(
    x,  # [T, D]
    residual,  # [T, D] or None
    weight,  # [D]
    bias,  # [D] or None
    options: NormOptions,
    *,
    tiling: TpuNormTiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return (normed, sum). Declines (`NotImplementedError`) float16, and tokens too large for
    VMEM."""
    quantize = options.quantize
    T, D = x.shape
    key = tiling_key(x, quantize=quantize)
    tiling = tiling or tuned(heuristic(x), "add_norm/tpu", key)
    if not interpret:
        _check_mosaic(tiling, x)
    rows = min(tiling.rows, T)
    token_spec = pl.BlockSpec((rows, D), lambda i: (i, 0))
    parameter_spec = pl.BlockSpec((1, D), lambda i: (0, 0))
    has = (residual is not None, bias is not None, quantize is not None)
    inputs = [x, weight[None]]
    in_specs = [token_spec, parameter_spec]
    out_shape = [jax.ShapeDtypeStruct((T, D), jnp.dtype(quantize or x.dtype))]
    out_specs = [token_spec]
    if residual is not None:
        inputs.append(residual)
        in_specs.append(token_spec)
        out_shape.append(jax.ShapeDtypeStruct((T, D), x.dtype))
        out_specs.append(token_spec)
    if bias is not None:
        inputs.append(bias[None])
        in_specs.append(parameter_spec)
    if quantize is not None:
        out_shape.append(jax.ShapeDtypeStruct((T, 1), jnp.float32))
        out_specs.append(pl.BlockSpec((rows, 1), lambda i: (i, 0)))
    normed, *rest = pl.pallas_call(
        partial(_kernel, has, _norm_of(options), quantize),
        grid=(pl.cdiv(T, rows),),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=max(16 * MEBI, vmem_bytes(tiling, x) * 4 // 3),
        ),
        interpret=interpret,
        name="add_norm",
    )(*inputs)
    total = x if residual is None else rest[0]
    return (normed, rest[-1]) if quantize else normed, total


def _check_mosaic(tiling: TpuNormTiling, x) -> None:
    if x.dtype == jnp.float16:
        raise NotImplementedError("Mosaic loads no float16; use bfloat16 or float32")
    needed = vmem_bytes(tiling, x)
    if needed > MAX_VMEM:
        raise NotImplementedError(
            f"a block of {tiling.rows} tokens takes {needed / MEBI:.1f} MiB of VMEM; "
            f"there is room for {MAX_VMEM // MEBI}"
        )


def _norm_of(options: NormOptions):
    """Return the norm of float32 rows [rows, D], in float32; `dtype` is what Llama's rounds to."""
    eps, offset, is_centred, _ = options

    def norm(wide, weight, bias, dtype):
        if is_centred:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        if is_centred:
            return scaled * weight if bias is None else scaled * weight + bias
        if offset:
            return scaled * (offset + weight)
        return scaled.astype(dtype).astype(jnp.float32) * weight

    return norm


def _kernel(has, norm, quantize, *refs):
    has_residual, has_bias, has_scales = has
    present = iter(refs)
    x = next(present)  # [rows, D]
    weight = next(present)  # [1, D]
    residual = next(present) if has_residual else None  # [rows, D]
    bias = next(present) if has_bias else None  # [1, D]
    normed = next(present)  # [rows, D]
    total = next(present) if has_residual else None  # [rows, D]
    scales = next(present) if has_scales else None  # [rows, 1]

    wide = x[...].astype(jnp.float32)
    if residual is not None and total is not None:
        rounded = (wide + residual[...].astype(jnp.float32)).astype(x.dtype)
        total[...] = rounded
        wide = rounded.astype(jnp.float32)
    shift = None if bias is None else bias[...].astype(jnp.float32)
    result = norm(wide, weight[...].astype(jnp.float32), shift, x.dtype).astype(x.dtype)
    if scales is None:
        normed[...] = result
        return
    wide, largest = result.astype(jnp.float32), QUANTIZED[quantize]
    amax = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(amax > 0, amax / largest, 1.0)
    values = jnp.clip(wide / scale, -largest, largest)
    if quantize == "int8":
        values = jnp.rint(values)
    normed[...] = values.astype(normed.dtype)
    scales[...] = scale
