"""A product with a quantized weight on GPUs, by Triton (sm_80 and later).

Formula and contract: `api.py`; the kernel: `gpu_kernel.py`. Few tokens (decodes) are bound by
memory: small tiles, and the rows of the weight are split among programs, whose partial results XLA
sums, so that all multiprocessors fetch. Many tokens are bound by the tensor cores: large tiles, in
bands that share their columns in L2.

float8 is multiplied as such from compute capability 8.9 on. On older chips, and with activations
of 16 or 32 bits, its values are converted by integer instructions; activations of float8 are then
multiplied as bfloat16, which holds them and the values exactly.

Measured by compiling for sm_80 and sm_90 without a device (Triton 3.6.0): no kernel spills.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray
from jaxinfer.kernels.triton_launch import (
    FLOAT8_CAPABILITY,
    Launcher,
    TritonLaunch,
    capability_in_use,
    check_schedule,
    jax_triton,
    require_triton,
)
from jaxinfer.kernels.tuning import tuned

FLOAT8 = "float8_e4m3fn"
# Programs that keep an H100 busy, two a multiprocessor. Used for every chip: on an A100, which 216
# keep busy, rows may be split once more than necessary. Tuned values correct it.
PROGRAMS = 264
MAX_SPLITS = 16
LONGEST_TOKEN = 65536
FEW_TOKENS = 64  # up to so many tokens memory is the limit


@dataclasses.dataclass(frozen=True)
class GpuQuantizedTiling:
    """How a call is divided. Results differ by rounding alone.

    `row_tile` is an upper bound, in rows of values as stored: the tile is the largest power of two
    up to it that lies in one group and one run of packed bytes.
    """

    token_tile: int
    column_tile: int
    row_tile: int
    splits: int = 1  # parts that the rows are split into
    num_warps: int = 4
    num_stages: int = 3
    band: int = 8

    def __post_init__(self):
        for name in ("token_tile", "column_tile", "row_tile"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, 16 or more")
        if self.splits < 1 or self.band < 1:
            raise ValueError(f"splits {self.splits} and band {self.band} must be 1 or more")
        check_schedule(self.num_warps, self.num_stages)


def heuristic(x, weight: QuantArray) -> GpuQuantizedTiling:
    """Return a tiling from shapes and types alone, of arrays as a backend takes them.

    Where each group has its own sums, or a tile holds two tiles of weights (4 bits), registers are
    short (255 a thread, by ptxas): such tiles are smaller, or have more warps.
    """
    T, F = x.shape[0], weight.num_columns
    bits = 8 * jnp.dtype(x.dtype).itemsize
    is_grouped, is_packed = weight.num_groups > 1, weight.bits == 4
    if T > FEW_TOKENS:
        if bits == 32:  # no tensor cores, and twice the registers
            return GpuQuantizedTiling(64, 64, 16, num_warps=8, num_stages=2)
        rows = (32 if is_packed else 64) * (1 if bits == 16 else 2)
        has_sums = is_grouped and (bits == 8 or x.dtype == jnp.float16)
        return GpuQuantizedTiling(64 if is_packed and has_sums else 128, 128, rows, num_warps=8)
    token_tile = max(16, 1 << (T - 1).bit_length())
    column_tile = 64 if bits == 32 or F < 128 * 32 else 128
    row_tile = 32 if bits == 32 else 64 if token_tile == FEW_TOKENS else 128
    tiles = -(-F // column_tile)
    iterations = -(-weight.values.shape[0] // row_tile)
    splits = 1
    while splits < MAX_SPLITS and tiles * splits < PROGRAMS and iterations >= 8 * splits:
        splits *= 2
    num_warps = 8 if token_tile > 16 and (is_grouped or bits == 32) else 4
    return GpuQuantizedTiling(token_tile, column_tile, row_tile, splits, num_warps)


def candidates(x, weight: QuantArray, **options: Any) -> list[GpuQuantizedTiling]:
    """Return the tilings worth measuring for the arguments of `quantized_matmul`."""
    T = x.shape[0]
    if T > FEW_TOKENS:
        return [
            GpuQuantizedTiling(tokens, columns, rows, 1, warps, stages)
            for tokens, columns in ((64, 128), (128, 64), (128, 128), (128, 256))
            for rows in (32, 64, 128)
            for warps in (4, 8)
            for stages in (2, 3, 4)
            if tokens * columns <= 4096 * warps
        ]
    token_tile = max(16, 1 << (T - 1).bit_length())
    return [
        GpuQuantizedTiling(token_tile, columns, rows, splits, warps, stages)
        for columns in (32, 64, 128)
        for rows in (64, 128)
        for splits in (1, 2, 4, 8, 16)
        for warps in (2, 4, 8)
        for stages in (2, 3, 5)
    ]


def tiling_key(x, weight: QuantArray, **options: Any) -> str:
    """Return the key of a measured tiling."""
    kind = "float8" if weight.is_float else f"int{weight.bits}"
    zeros = " zeros" if weight.zeros is not None else ""
    taken = options.get("activation_dtype") or jnp.dtype(x.dtype).name
    T, D, F = 1 << (x.shape[0] - 1).bit_length(), weight.num_rows, weight.num_columns
    return f"T={T} D={D} F={F} {kind}/{weight.group_size}{zeros} {taken}"


def quantized_matmul(
    x,  # [T, D]
    weight: QuantArray,  # [D, F]
    *,
    x_scale,  # [T, 1] or None
    out_dtype,
    tiling: GpuQuantizedTiling | None = None,
    launch: Launcher = jax_triton,
):
    """Return [T, F]. Declines (`NotImplementedError`) without Triton, and groups too short for a
    tile."""
    require_triton()
    key = tiling_key(x, weight)
    values = weight.values
    if x.dtype == FLOAT8 and not _multiplies_float8():
        x = x.astype(jnp.bfloat16)
    if weight.is_float and x.dtype != FLOAT8:
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    tiling = tiling or tuned(heuristic(x, weight), "quantized_matmul/gpu", key)
    scaling = _scaling(tiling, x, weight, x_scale is not None)
    rows = _row_tile(tiling, x, weight, scaling)
    T, F, splits = x.shape[0], weight.num_columns, tiling.splits
    out = jax.ShapeDtypeStruct((T, F) if splits == 1 else (splits, T, F), out_dtype)
    if splits > 1:
        out = jax.ShapeDtypeStruct(out.shape, jnp.float32)
    (out,) = launch(_launch(x, weight, values, x_scale, out, tiling, scaling, rows))
    return out if splits == 1 else out.sum(axis=0).astype(out_dtype)


def quantize_activations(
    x,  # [T, D]
    dtype: Any,
    largest: float,
    *,
    launch: Launcher = jax_triton,
):
    """Return (values, scales), a program a token; formula: `api.py`.

    Declines (`NotImplementedError`) without Triton, float8 on chips that lack it, and tokens too
    long for a program's registers.
    """
    require_triton()
    T, D = x.shape
    if dtype == FLOAT8 and not _multiplies_float8():
        raise NotImplementedError("float8 needs a compute capability of 8.9 or more")
    if D > LONGEST_TOKEN:
        raise NotImplementedError(f"a token of {D} numbers; a program holds {LONGEST_TOKEN}")
    from jaxinfer.kernels.quantized_matmul.gpu_kernel import _quantize_token

    BD = 1 << (D - 1).bit_length()
    values = jax.ShapeDtypeStruct((T, D), dtype)
    scale = jax.ShapeDtypeStruct((T, 1), jnp.float32)
    constexprs = {"D": D, "BD": BD, "LARGEST": largest, "IS_INTEGER": dtype == jnp.int8}
    num_warps = min(16, max(1, BD // 1024))
    return launch(TritonLaunch(_quantize_token, (T,), (x,), (values, scale), constexprs, num_warps))


def _multiplies_float8() -> bool:
    """Return whether the chip in use multiplies float8; one that reports nothing (a CPU, in tests)
    counts as if it did."""
    capability = capability_in_use()
    return capability is None or capability >= FLOAT8_CAPABILITY


def _scaling(tiling: GpuQuantizedTiling, x, weight: QuantArray, is_x_quantized: bool) -> str:
    """Return where a group's scale is applied (`gpu_kernel.py`): to a tile's weights or to its
    sums, whichever are fewer.

    float16 does not hold every scaled weight, and integer products need sums of their own.
    """
    if weight.num_groups == 1:
        return "end"
    if is_x_quantized or x.dtype == jnp.float16 or tiling.token_tile <= FEW_TOKENS:
        return "sums"
    return "weights"


def _row_tile(tiling: GpuQuantizedTiling, x, weight: QuantArray, scaling: str) -> int:
    """Return the rows of a tile of values. Raises `NotImplementedError` for groups it cannot
    cut."""
    limits = [weight.pack_rows // 2] if weight.bits == 4 else []
    if scaling != "end":
        limits.append(weight.group_size)
    common = math.gcd(*limits)  # 0: no limit
    rows = min(tiling.row_tile, common & -common) if common else tiling.row_tile
    least = 32 if jnp.dtype(x.dtype).itemsize == 1 else 16
    if rows < least:
        raise NotImplementedError(
            f"groups of {weight.group_size} of D = {weight.num_rows} rows are cut in tiles of "
            f"{rows}; a product of {x.dtype} takes {least}"
        )
    return rows


def _launch(
    x, weight: QuantArray, values, x_scale, out, tiling: GpuQuantizedTiling, scaling: str, rows: int
):
    from jaxinfer.kernels.quantized_matmul.gpu_kernel import _quantized_matmul

    T, F = x.shape[0], weight.num_columns
    num_rows = values.shape[0]
    iterations = -(-num_rows // (rows * tiling.splits))
    has_zeros, has_x_scale = weight.zeros is not None, x_scale is not None
    tiles = -(-T // tiling.token_tile) * -(-F // tiling.column_tile)
    return TritonLaunch(
        _quantized_matmul,
        (tiles, tiling.splits),
        (
            x,
            values,
            weight.scales,
            weight.zeros if has_zeros else weight.scales,
            x_scale if has_x_scale else weight.scales,
            T,
        ),
        (out,),
        {
            "F": F,
            "ROWS": num_rows,
            "ITERATIONS": iterations,
            "IS_EVEN": num_rows == tiling.splits * iterations * rows,
            "GROUP": weight.group_size,
            "HALF": weight.pack_rows // 2,
            "IS_FLOAT8": weight.is_float and x.dtype != FLOAT8,
            "MIDDLE": 0 if has_zeros else weight.middle,
            "HAS_ZEROS": has_zeros,
            "HAS_X_SCALE": has_x_scale,
            "SCALING": scaling,
            "BT": tiling.token_tile,
            "BF": tiling.column_tile,
            "BK": rows,
            "BAND": tiling.band,
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
