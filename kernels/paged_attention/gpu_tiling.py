"""Tilings of the GPU kernel of paged attention."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.folding import fold_of
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.gpu_plan import power_of_two
from jaxinfer.kernels.paged_attention.rows import RaggedRows
from jaxinfer.kernels.triton_launch import capability_in_use, check_schedule

KIBI = 1 << 10

SCALED = ("int8", "float8_e4m3fn")  # types of pages that come with scales


@dataclasses.dataclass(frozen=True)
class GpuPagedTiling:
    """How a call is divided. Results differ by rounding alone."""

    row_block: int  # rows of a product: tokens of an item times the heads of a group
    block: int  # tokens of a step of the softmax
    stages: int  # blocks on their way from memory at the same time
    num_warps: int
    occupancy: int  # programs of the grid for each multiprocessor

    def __post_init__(self):
        for name in ("row_block", "block"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two of at least 16")
        for name in ("stages", "occupancy"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        check_schedule(self.num_warps, self.stages)


def heuristic(q, k_pages, kv_len) -> GpuPagedTiling:
    """Return a tiling from shapes and types alone; no choice spills registers (`ptxas -v`, sm_80,
    sm_90).

    As many rows as tokens are most likely decodes: a group's heads fill few rows of a product and
    memory is the limit, so 16 rows, and as many programs a multiprocessor as fit, to hide the start
    of each unit. Otherwise a token meets a block once in a tile of 128 rows, which the second level
    of cache can feed (3.8 TB/s at an H100's full speed; 64 rows need twice that); 64 where
    decodes are likely half of the items or registers are short.
    """
    T, N, H = q.shape
    lanes, stored = power_of_two(H, 16), k_pages.dtype.name
    group = power_of_two(N // k_pages.shape[1], 16)
    is_large = lanes > 128
    if kv_len.shape[0] == T or is_wide(q, k_pages):
        # 64 tokens a step spill for some shapes on an H100, where ptxas aims at fewer registers.
        block = 64 if stored == "int8" and not is_large else 32
        stages = 2 if is_wide(q, k_pages) else 3 if is_large and stored not in SCALED else 4
        first = GpuPagedTiling(group, block, stages, 8 if is_large else 4, occupancy=1)
        most = 2 if is_large or is_wide(q, k_pages) else 4 if lanes <= 64 else 3
        fitting = shared_memory() // (_stage_bytes(first, q, k_pages) + 8 * KIBI)
        return dataclasses.replace(first, occupancy=max(1, min(most, fitting)))
    is_short = is_large or stored in SCALED  # of registers
    rows = 64 if is_short or 4 * kv_len.shape[0] > T else 128
    rows = max(group, min(rows, power_of_two(T * N // k_pages.shape[1], 16)))
    is_small = rows < 128 and not is_large
    return GpuPagedTiling(
        row_block=rows,
        block=32 if is_short else 64,
        stages=2 if is_small and shared_memory() < 200 * KIBI and stored not in SCALED else 3,
        num_warps=4 if is_small else 8,
        occupancy=2 if is_small else 1,
    )


def shared_memory() -> int:
    """Return the bytes of shared memory of a multiprocessor of the GPU that is traced for or in
    use."""
    capability = capability_in_use()
    return (164 if capability is not None and capability < 90 else 228) * KIBI


def candidates(q, rows: RaggedRows, pages: KVPages, *_: Any, **__: Any) -> list[GpuPagedTiling]:
    """Return the tilings that a search tries for the arguments of `paged_attention`."""
    T, N, _ = q.shape
    is_decode = rows.kv_len.shape[0] == T
    group = power_of_two(N // pages.k.shape[1], 16)
    tiles = (16, 32) if is_decode else (16, 32, 64, 128)
    found = [
        GpuPagedTiling(row_block, block, stages, num_warps, occupancy)
        for row_block in sorted({max(group, rows) for rows in tiles})
        for block, stages, num_warps in itertools.product((32, 64, 128), (2, 3, 4), (4, 8))
        for occupancy in ((2, 3, 4) if is_decode else (1, 2))
    ]
    return [tiling for tiling in found if _may_fit(tiling, q, pages.k)]


def tiling_key(q, rows: RaggedRows, pages: KVPages, variant: AttentionVariant, **_: Any) -> str:
    """Return the key of a measured tiling for the arguments of `paged_attention`."""
    page_size = pages.k.shape[2] * fold_of(pages.k.shape[3], q.shape[2])
    return key_of(q, pages.k, rows.kv_len.shape[0], page_size, variant.window)


def key_of(q, k_pages, R: int, B: int, window: int | None) -> str:
    (T, N, H), K = q.shape, k_pages.shape[1]
    kind = " window" if window is not None else ""
    return f"T={T} R={R} N={N} K={K} H={H} B={B} {q.dtype.name} {k_pages.dtype.name}{kind}"


def is_wide(q, k_pages) -> bool:
    """Return whether products are of float32: tensor cores take two operands of one narrow type."""
    return q.dtype == jnp.float32 or k_pages.dtype.name not in (q.dtype.name, *SCALED)


def _may_fit(tiling: GpuPagedTiling, q, k_pages) -> bool:
    """Return whether a multiprocessor holds the grid's share of programs: their blocks, and their
    sums in 32-bit registers, of which a thread has 255 and other values take some 100."""
    lanes = power_of_two(q.shape[2], 16)
    numbers = tiling.row_block * (lanes + tiling.block) + tiling.block * lanes // 2
    threads = 32 * tiling.num_warps
    registers = numbers // threads + 100
    needed = tiling.occupancy * (_stage_bytes(tiling, q, k_pages) + 8 * KIBI)
    is_held = tiling.occupancy * threads * registers <= 65536
    return registers <= 255 and is_held and needed <= shared_memory()


def _stage_bytes(tiling: GpuPagedTiling, q, k_pages) -> int:
    """Return the shared memory of the blocks being loaded: all but the one being computed."""
    lanes = power_of_two(q.shape[2], 16)
    return 2 * (tiling.stages - 1) * tiling.block * lanes * k_pages.dtype.itemsize
