"""How a weight is passed to a Triton kernel that reads it with `gpu_weights.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray

LEAST = 16  # rows, columns and depth that a product on tensor cores needs
# The number of an H100, used for every chip: an A100 (108) gets narrower tiles than it needs where
# F is 109 to 131 of them. Tuned values correct it.
MULTIPROCESSORS = 132
WIDE_SHARED = ("H100", "H200", "B200")  # 227 KiB of shared memory a block and warp-group products


def has_wide_tiles() -> bool:
    """Return whether the GPU that is traced for has memory and registers for tiles of 128 x 256."""
    return any(name in device_kind() for name in WIDE_SHARED)


def most_rows(weight) -> int:
    """Return the most rows of a step of the product: no step may cross a group or a half of a run
    of packed rows."""
    if not isinstance(weight, QuantArray):
        return 128
    half = weight.pack_rows // 2 or weight.num_rows
    sizes = (128, weight.group_size & -weight.group_size, half & -half)
    return min(sizes)


def check_weight(weight, x) -> None:
    """Raise `NotImplementedError` for what the kernels do not read."""
    if isinstance(weight, QuantArray):
        if weight.is_float:
            raise NotImplementedError("float8 weights are not read here; use int8, or backend xla")
        if most_rows(weight) < LEAST:
            raise NotImplementedError(
                f"groups of {weight.group_size} rows, {weight.pack_rows // 2} between the halves "
                f"of a byte; a step needs {LEAST} rows of one scale"
            )
    elif weight.dtype != x.dtype:
        raise NotImplementedError(f"x is {x.dtype}, the weights are {weight.dtype}; cast one")
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"x is {x.dtype}; products take bfloat16, float16 and float32")


def weight_inputs(weight) -> tuple[Any, Any, Any]:
    """Return values, scales, zeros; an absent one is replaced by another, which is not read."""
    if not isinstance(weight, QuantArray):
        return weight, weight, weight
    return weight.values, weight.scales, weight.scales if weight.zeros is None else weight.zeros


def weight_constexprs(weight, x) -> dict[str, Any]:
    """Return what a kernel must know of the weight [E, D, F] and of its product with x."""
    precision = {"PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32"}
    if not isinstance(weight, QuantArray):
        D, F = weight.shape[1:]
        storage = {"BITS": 0, "GROUP_SIZE": D, "HALF": 0, "MIDDLE": 0, "HAS_ZEROS": False}
        return {"D": D, "F": F, "STORED": D, **storage, **precision}
    return {
        "D": weight.num_rows,
        "F": weight.num_columns,
        "STORED": weight.values.shape[1],
        "BITS": weight.bits,
        "GROUP_SIZE": weight.group_size,
        "HALF": weight.pack_rows // 2,
        "MIDDLE": weight.middle,
        "HAS_ZEROS": weight.zeros is not None,
        **precision,
    }
