"""Flash attention on GPUs, by Triton (sm_80 and later).

Formula and contract: `api.py`; the kernel: `gpu_kernel.py`; mods: `triton_source.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.flash_attention.blocks import fit, tile_kinds, walk_of
from jaxinfer.kernels.flash_attention.rule import (
    NO_MASK,
    PLAIN,
    AttentionMask,
    Features,
    FlashArrays,
    FlashRule,
    Mod,
    features_of,
    features_of_call,
    key_of,
    tiling_key,
)
from jaxinfer.kernels.triton_launch import (
    Launcher,
    TritonLaunch,
    capability_in_use,
    check_schedule,
    jax_triton,
    require_triton,
)
from jaxinfer.kernels.tuning import tuned

__all__ = ["GpuFlashTiling", "candidates", "flash_attention", "heuristic", "tiling_key"]

MIN_TILE = 16  # of a product on tensor cores
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)


@dataclasses.dataclass(frozen=True)
class GpuFlashTiling:
    """Sizes of tiles of queries and keys. Results differ by rounding alone."""

    q_tile: int
    k_tile: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name in ("q_tile", "k_tile"):
            value = getattr(self, name)
            if value < MIN_TILE or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two from {MIN_TILE} on")
        check_schedule(self.num_warps, self.num_stages)


def heuristic(q, k, features: Features = PLAIN) -> GpuFlashTiling:
    """Return a tiling from shapes, types and features: the largest tiles for which no value is
    spilled, by compiling for sm_80 and sm_90 (Triton 3.6.0). Hopper's products read their operands
    from shared memory and so leave room in the registers."""
    T, H = q.shape[1], q.shape[3]
    if jnp.dtype(q.dtype).itemsize == 4:  # no tensor cores, and twice the registers
        tiling = GpuFlashTiling(16 if H == 192 else 32, 32 if H <= 96 else 16, 8, 1)
    elif (capability_in_use() or 80) >= 90:
        if H <= 64:
            tiling = GpuFlashTiling(128, 64, 4, 3)
        else:
            tiling = GpuFlashTiling(128, 64, 8, 3) if H <= 128 else GpuFlashTiling(128, 32, 8, 2)
    elif H <= 128:
        tiling = GpuFlashTiling(128, 64 if not features.used or H <= 64 else 32, 8, 2)
    else:
        tiling = GpuFlashTiling(64, 32, 8, 3 if H == 192 else 2)
    q_tile = min(tiling.q_tile, max(MIN_TILE, 1 << (T - 1).bit_length()))
    return dataclasses.replace(tiling, q_tile=q_tile)


def candidates(
    q, k, _v, variant: AttentionVariant, mask: AttentionMask = NO_MASK, *,
    score_mod: Mod | None = None, **_: Any,
) -> list[GpuFlashTiling]:  # fmt: skip
    """Return the tilings worth measuring for the arguments of `flash_attention`."""
    first = heuristic(q, k, features_of_call(variant, mask, score_mod))
    H = q.shape[3]
    if jnp.dtype(q.dtype).itemsize == 4:
        found = [GpuFlashTiling(m, b, w, 1) for m in (16, 32, 64) for b in (16, 32) for w in (4, 8)]
    else:
        tiles = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128)]
        found = [
            GpuFlashTiling(m, b, w, s)
            for m, b in tiles
            for w in (4, 8)
            for s in (2, 3, 4)
            if s * b * H <= 2**15 and m * H <= 2**13 * w
        ]
    return [first, *(tiling for tiling in found if tiling != first)]


@dataclasses.dataclass(frozen=True)
class GpuFlashPlan:
    """What the kernel is compiled for; its only constexpr."""

    heads: int  # N
    kv_heads: int  # K
    half: int  # the largest power of two up to the head dim
    rest: int  # the rest of the head dim
    q_tile: int
    k_tile: int
    intervals: int  # C, intervals a key is hidden in
    causal: bool
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    has_slopes: bool
    has_lists: bool
    row_lists: bool  # lists differ by row
    head_lists: bool  # lists differ by head
    mask_mod: Any  # functions under `triton.jit`, or None
    score_mod: Any
    precision: str  # of products of float32

    @property
    def head_dim(self) -> int:
        return self.half + self.rest

    @property
    def rest_lanes(self) -> int:
        return self.rest or MIN_TILE

    @property
    def group(self) -> int:
        """Query heads of a KV head: G."""
        return self.heads // self.kv_heads

    @property
    def has_plain_scores(self) -> bool:
        return self.soft_cap is None and self.score_mod is None and not self.has_slopes


def flash_attention(
    q,  # [R, T, N, H]
    k,  # [R, S, K, H]
    v,  # [R, S, K, H]
    arrays: FlashArrays,
    rule: FlashRule,
    *,
    tiling: GpuFlashTiling | None = None,
    launch: Launcher = jax_triton,
):
    """Return (out, lse or None). Declines (`NotImplementedError`) mods that Triton cannot express,
    and heads that do not fit."""
    require_triton()
    from jaxinfer.kernels.flash_attention import gpu_kernel

    (R, T, N, H), (S, K) = q.shape, k.shape[1:3]
    if H not in HEAD_DIMS:
        raise NotImplementedError(f"head dim {H}; the kernel has {HEAD_DIMS}")
    if max(T * N, S * K) * H >= 2**31:
        raise NotImplementedError(f"a row of {max(T * N, S * K)} heads of {H} passes 2**31 numbers")
    if tiling is None:
        features = features_of(arrays, rule)
        key = key_of(q, k, features)
        tiling = tuned(heuristic(q, k, features), "flash_attention/gpu", key)
    if arrays.block_mask is not None:
        fitted = {
            "q_tile": _power(tiling.q_tile, arrays.block_mask.q_block),
            "k_tile": _power(tiling.k_tile, arrays.block_mask.k_block),
        }
        tiling = dataclasses.replace(tiling, **fitted)
    walk: tuple[Any, ...] = (0, 0, 0)
    list_axes = None
    if arrays.block_mask is not None or arrays.hidden is not None:
        kinds = tile_kinds(rule, arrays, T, S, (tiling.q_tile, tiling.k_tile))
        walk, list_axes = tuple(jnp.asarray(x) for x in walk_of(kinds)), kinds.shape[:2]
    dtype = jnp.result_type(q.dtype, k.dtype)
    float32 = lambda x: 0 if x is None else x.astype(jnp.float32)
    inputs = (
        *(x.astype(dtype) for x in (q, k, v)), arrays.offsets(R), arrays.lengths(R, S),
        float32(arrays.sinks), float32(arrays.alibi_slopes), *(arrays.hidden or (0, 0)), *walk,
        T, S, float(rule.scale),
    )  # fmt: skip
    lse = jax.ShapeDtypeStruct((R, N, T), jnp.float32)
    out, lse = launch(
        TritonLaunch(
            kernel=gpu_kernel.flash_attention,
            grid=(-(-T // tiling.q_tile), N, R),
            inputs=inputs,
            outputs=(jax.ShapeDtypeStruct(q.shape, q.dtype), lse),
            constexprs={"plan": _plan(N, K, H, arrays, rule, tiling, list_axes, dtype)},
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    )
    return out, lse.swapaxes(1, 2) if rule.return_lse else None


def _plan(
    N: int,
    K: int,
    H: int,
    arrays: FlashArrays,
    rule: FlashRule,
    tiling: GpuFlashTiling,
    list_axes,
    dtype,
):
    from jaxinfer.kernels.flash_attention.triton_source import mask_function, score_function

    half = 1 << (H.bit_length() - 1)
    return GpuFlashPlan(
        heads=N,
        kv_heads=K,
        half=half,
        rest=H - half,
        q_tile=tiling.q_tile,
        k_tile=tiling.k_tile,
        intervals=0 if arrays.hidden is None else arrays.hidden.start.shape[1],
        causal=rule.causal,
        window=rule.window,
        soft_cap=rule.soft_cap,
        has_sinks=arrays.sinks is not None,
        has_slopes=arrays.alibi_slopes is not None,
        has_lists=list_axes is not None,
        row_lists=list_axes is not None and list_axes[0] > 1,
        head_lists=list_axes is not None and list_axes[1] > 1,
        mask_mod=None if rule.mask_mod is None else mask_function(rule.mask_mod),
        score_mod=None if rule.score_mod is None else score_function(rule.score_mod),
        precision="ieee" if dtype == jnp.float32 else "tf32",
    )


def _power(tile: int, block: int) -> int:
    """Return the largest power of two up to `tile` that divides `block`."""
    size = fit(tile, block & -block)
    if size < MIN_TILE:
        raise NotImplementedError(f"blocks of {block} are no multiple of {MIN_TILE}")
    return size
