"""Residual sum and norm on GPUs: one Triton kernel. Formula and contract: `api.py`.

XLA makes two kernels of the same, three with int8 (2048 tokens of 4096 compiled for an H100,
jax 0.10.2), and reads the sum again in each.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxinfer.kernels.add_norm.options import NormOptions
from jaxinfer.kernels.kv_pages import QUANTIZED
from jaxinfer.kernels.triton_launch import (
    Launcher,
    TritonLaunch,
    jax_triton,
    require_float8,
    require_triton,
)
from jaxinfer.kernels.tuning import tuned

MAX_DIM = 16384  # 32 numbers a thread over 16 warps: beyond it a token does not fit in registers


@dataclasses.dataclass(frozen=True)
class GpuNormTiling:
    """How a call is divided: tokens a program takes (a power of two), warps a program has."""

    rows: int
    num_warps: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two")


def heuristic(x) -> GpuNormTiling:
    """Return a tiling from shapes: a token a program, more where one has less than 1024 numbers; 8
    to 32 numbers a thread, so that each loads 16 bytes at a time."""
    block = _block(x)
    rows = max(1, 1024 // block)
    return GpuNormTiling(rows, min(16, max(4, rows * block // 512)))


def candidates(x, *_arguments, **_options) -> list[GpuNormTiling]:
    """Return the tilings worth measuring for an operator's abstract arguments."""
    block = _block(x)
    tilings = [
        GpuNormTiling(rows, num_warps)
        for rows in (1, 2, 4, 8, 16)
        for num_warps in (2, 4, 8, 16)
        if 4 * 32 * num_warps <= rows * block <= 32 * 32 * num_warps
    ]
    return list(dict.fromkeys([heuristic(x), *tilings]))


def tiling_key(x, *_arguments, quantize: str | None = None, **_options) -> str:
    """Return the key of a measured tiling: tokens, numbers of a token, types."""
    return f"T={x.shape[0]} D={x.shape[1]} {x.dtype} {quantize}"


def add_norm(
    x,  # [T, D]
    residual,  # [T, D] or None
    weight,  # [D]
    bias,  # [D] or None
    options: NormOptions,
    *,
    tiling: GpuNormTiling | None = None,
    launch: Launcher = jax_triton,
):
    """Return (normed, sum).

    Declines (`NotImplementedError`) tokens of more than `MAX_DIM` numbers, and float8 on a GPU that
    has none.
    """
    eps, offset, is_centred, quantize = options
    require_triton()
    if quantize == "float8_e4m3fn":
        require_float8()
    T, D = x.shape
    if D > MAX_DIM:
        raise NotImplementedError(f"a token has {D} numbers; registers hold {MAX_DIM}")
    from jaxinfer.kernels.add_norm import gpu_kernel

    key = tiling_key(x, quantize=quantize)
    tiling = tiling or tuned(heuristic(x), "add_norm/gpu", key)
    absent = jax.ShapeDtypeStruct((1,), jnp.float32)  # an output that is not written
    normed, total, scales = launch(
        TritonLaunch(
            gpu_kernel.add_norm,
            (-(-T // tiling.rows),),
            (x, _or_zero(residual), weight, _or_zero(bias), T),
            (
                jax.ShapeDtypeStruct((T, D), jnp.dtype(quantize or x.dtype)),
                absent if residual is None else jax.ShapeDtypeStruct((T, D), x.dtype),
                jax.ShapeDtypeStruct((T, 1), jnp.float32) if quantize else absent,
            ),
            {
                "D": D,
                "BLOCK": _block(x),
                "ROWS": tiling.rows,
                "EPS": float(eps),
                "OFFSET": float(offset),
                "HAS_RESIDUAL": residual is not None,
                "HAS_BIAS": bias is not None,
                "IS_CENTRED": is_centred,
                "LARGEST": QUANTIZED[quantize] if quantize else 0.0,
                "IS_INTEGER": quantize == "int8",
            },
            num_warps=tiling.num_warps,
        )
    )
    return (normed, scales) if quantize else normed, x if residual is None else total


def _block(x) -> int:
    return 1 << (x.shape[1] - 1).bit_length()


def _or_zero(array):
    """Return 0 for an absent array: the kernel does not read it."""
    return 0 if array is None else array
