"""Rotary embedding and cache write on GPUs: one Triton launch, the pages in place.

Formula and contract: `api.py`. Folded pages, which suit TPUs, are declined.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.kv_pages import QUANTIZED, KVPages, NewTokens
from jaxinfer.kernels.rotary import Rotary
from jaxinfer.kernels.triton_launch import (
    Launcher,
    TritonLaunch,
    jax_triton,
    require_float8,
    require_triton,
)
from jaxinfer.kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class GpuRopeTiling:
    """How a call is divided: heads of a token that a program takes (a power of two), its warps."""

    heads: int
    num_warps: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two")


@dataclasses.dataclass(frozen=True)
class GpuRopePlan:
    """What a program is compiled for; the kernel's only constexpr."""

    num_heads: int  # heads of queries; 0: they are not copied
    num_kv_heads: int
    head_dim: int
    page_size: int
    half: int  # pairs that are rotated
    half_padded: int  # padded to a power of two, as the next two are
    rest_padded: int  # numbers of a head that are not rotated
    head_padded: int
    q_heads: int  # heads that a program takes
    kv_heads: int
    q_blocks: int  # programs of a token
    kv_blocks: int
    largest: float  # the largest number of the pages' quantized type; 0: not quantized


def heuristic(q, k) -> GpuRopeTiling:
    """Return a tiling with about 1024 numbers a program, 16 bytes of each half a thread: a decode
    of 64 tokens of Llama-3-8B is then 384 programs, three for each multiprocessor of an H100."""
    heads = max(1, 1024 // _padded(q.shape[2]))
    most = _padded(max(q.shape[1], k.shape[1]))
    return GpuRopeTiling(min(heads, most), 2)


def candidates(q, new: NewTokens, *_: Any, **__: Any) -> list[GpuRopeTiling]:
    """Return the tilings worth measuring for the arguments of `rope_and_write`."""
    most = _padded(max(q.shape[1], new.k.shape[1]))
    sizes = [heads for heads in (1, 2, 4, 8, 16, 32) if heads <= most]
    return [GpuRopeTiling(heads, num_warps) for heads in sizes for num_warps in (1, 2, 4)]


def tiling_key(q, new: NewTokens, _rotary, pages: KVPages, **_: Any) -> str:
    """Return the key of a measured tiling: tokens, heads, types."""
    T, N, H = q.shape
    return f"T={T} N={N} K={new.k.shape[1]} H={H} {q.dtype} {pages.k.dtype}"


def rope_and_write(
    q,  # [T, N, H]
    new: NewTokens,
    rotary: Rotary | None,
    pages: KVPages,  # k, v: [P, K, B, H]
    *,
    tiling: GpuRopeTiling | None = None,
    launch: Launcher = jax_triton,
):
    """Return (rotated queries, pages).

    Declines (`NotImplementedError`) folded pages, pages without values, and float8 on a GPU that
    has none.
    """
    if pages.v is None:
        raise NotImplementedError("the pages have no values; it writes both")
    require_triton()
    k, v, page, offset = new
    cos, sin = rotary or (None, None)
    if pages.k.shape[3] != k.shape[2]:
        raise NotImplementedError("pages are folded, which suits a TPU; allocate plain ones")
    if pages.k.dtype == jnp.float8_e4m3fn:
        require_float8()
    from jaxinfer.kernels.rope_and_write import gpu_kernel

    T = k.shape[0]
    key = tiling_key(q, new, rotary, pages)
    tiling = tiling or tuned(heuristic(q, k), "rope_and_write/gpu", key)
    plan = _plan(tiling, q, k, cos, pages)
    absent = jax.ShapeDtypeStruct((1,), jnp.float32)  # an output that is not written
    same = lambda x: absent if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    # Side by side, as one product for all three leaves them: XLA then passes its result on as it
    # is, where it would slice three operands out (a layer compiled for an H100: 11 launches, with
    # this 8).
    parts = [k, v] if cos is None else [q, k, v]
    heads = jnp.concatenate([x.reshape(T, -1) for x in parts], axis=1)
    inputs = (heads, cos, sin, page, offset, pages.k.shape[0], *pages)
    rotated, *stored = launch(
        TritonLaunch(
            gpu_kernel.rope_and_write,
            (T, plan.q_blocks + 2 * plan.kv_blocks),
            tuple(0 if x is None else x for x in inputs),  # the kernel does not read a 0
            (same(None if cos is None else q), *(same(x) for x in pages)),
            {"plan": plan},
            num_warps=tiling.num_warps,
            aliases={6 + i: 1 + i for i, x in enumerate(pages) if x is not None},
        )
    )
    scales = stored[2:] if pages.k_scales is not None else ()
    return q if cos is None else rotated, KVPages(*stored[:2], *scales)


def _plan(tiling: GpuRopeTiling, q, k, cos, pages) -> GpuRopePlan:
    N, K, H = 0 if cos is None else q.shape[1], k.shape[1], k.shape[2]
    half = 0 if cos is None else cos.shape[1]
    q_heads, kv_heads = min(tiling.heads, _padded(N)), min(tiling.heads, _padded(K))
    return GpuRopePlan(
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        page_size=pages.k.shape[2],
        half=half,
        half_padded=_padded(half),
        rest_padded=_padded(H - 2 * half),
        head_padded=_padded(H),
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_blocks=-(-N // q_heads),
        kv_blocks=-(-K // kv_heads),
        largest=QUANTIZED[pages.k.dtype.name] if pages.k_scales is not None else 0.0,
    )


def _padded(num: int) -> int:
    return 1 << max(num - 1, 0).bit_length()
