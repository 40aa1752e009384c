"""Paged attention for Hopper GPUs in Pallas (Mosaic GPU): steps that hold prefill chunks.

A CTA takes a run of queries of one row and a KV head: one warpgroup copies pages by TMA, the others
multiply by wgmma (`hopper_kernel.py`; FlashAttention-3, arXiv:2407.08608). All rows of the step are
done, decodes as short runs; steps of decodes alone are left to `gpu.py`, which splits long contexts
over the multiprocessors. Vocabulary: `hopper_plan.py`; formula and contract: `api.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.hopper_plan import (
    WARPGROUP_ROWS,
    HopperPlan,
    lanes_at_once,
    lse_of_tokens,
    num_items,
    work_list,
)
from jaxinfer.kernels.paged_attention.rows import RaggedRows
from jaxinfer.kernels.tuning import tuned

KIBI = 1 << 10
DEVICES = ("H100", "H200", "H800", "H20")
TYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
ASSEMBLER = "nvidia-cuda-nvcc-cu12"
FIRST_SOUND_ASSEMBLER = (12, 9, 86)  # of CUDA 12.9.1
LEAST_PAGE = 8  # rows of a tile of shared memory

SHARED_BYTES = 227 * KIBI  # the most that a CTA can have
# For barriers, for sums over warps, which Pallas keeps whether there are any or not, and for
# alignment (compiled, jax 0.10.2: up to 3,152 bytes).
OTHER_BYTES = 4 * KIBI


@dataclasses.dataclass(frozen=True)
class HopperTiling:
    """How a call is divided. Results differ by rounding alone."""

    block: int  # tokens of a step of the softmax
    slots: int  # blocks being loaded at the same time
    warpgroups: int = 2  # warpgroups that compute, 64 rows each

    def __post_init__(self):
        if self.block not in (64, 128, 256):
            raise ValueError(f"block is {self.block}; it must be 64, 128 or 256")
        if self.slots < 2:
            raise ValueError(f"slots is {self.slots}; it must be at least 2")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups is {self.warpgroups}; it must be 1 or 2")


def shared_bytes(tiling: HopperTiling, head_dim: int) -> int:
    """Return the shared memory of queries, results and blocks."""
    operands = head_dim * (tiling.warpgroups * WARPGROUP_ROWS + 2 * tiling.slots * tiling.block)
    results = lanes_at_once(head_dim) * tiling.warpgroups * WARPGROUP_ROWS
    return 2 * (operands + results) + 4 * tiling.warpgroups * WARPGROUP_ROWS + OTHER_BYTES


def heuristic(head_dim: int, page_size: int) -> HopperTiling:
    """Return a tiling that fits the registers: sums take head_dim / 2 of a thread's 232, scores
    block / 2, and half as much again as weights.

    Slots are as many as fit, four at most. A block of 16 pages makes the copying warpgroup spill
    their ids.
    """
    block = 128 if head_dim < 128 and page_size >= 16 else 64
    slots = next(
        s for s in (4, 3, 2) if shared_bytes(HopperTiling(block, s), head_dim) <= SHARED_BYTES
    )
    return HopperTiling(block, slots)


def candidates(q, rows: RaggedRows, pages: KVPages, *_: Any, **__: Any) -> list[HopperTiling]:
    """Return the tilings worth measuring for the arguments of `paged_attention`."""
    H, B = q.shape[2], pages.k.shape[2]
    first = heuristic(H, B)
    found = [first]
    for block, slots, warpgroups in itertools.product((64, 128), (2, 3, 4), (2, 1)):
        tiling = HopperTiling(block, slots, warpgroups)
        registers = (2 * H + 3 * block) // 4
        fits = registers <= 200 and shared_bytes(tiling, H) <= SHARED_BYTES
        if tiling != first and fits and _divides(block, B):
            found.append(tiling)
    return found


def tiling_key(q, rows: RaggedRows, pages: KVPages, variant: AttentionVariant, **_: Any) -> str:
    """Return the key of a measured tiling for the arguments of `paged_attention`."""
    (_T, N, H), (_P, K, B, _L) = q.shape, pages.k.shape
    window = " window" if variant.window is not None else ""
    return f"N={N} K={K} H={H} B={B} {q.dtype.name}{window}"


def paged_attention(
    q,  # [T, N, H]
    rows: RaggedRows,
    pages: KVPages,  # k, v: [P, K, B, H]
    variant: AttentionVariant,
    *,
    return_lse: bool = False,
    tiling: HopperTiling | None = None,
    interpret: Any = False,  # or Pallas' parameters of its GPU emulator
):
    """Return (out [T, N, H], lse [T, N] or None).

    Declines (`NotImplementedError`) steps without a chunk, GPUs that are not Hopper, types, head
    dims and pages that TMA and wgmma do not take.
    """
    _check(q, rows, pages)
    if not interpret:
        _check_device()
        _check_assembler()
    tiling = tiling or tuned(
        heuristic(q.shape[2], pages.k.shape[2]),
        "paged_attention/hopper",
        tiling_key(q, rows, pages, variant),
    )
    plan = _plan_of(
        tiling,
        q,
        rows,
        pages.k,
        scale=float(variant.scale),
        window=variant.window,
        soft_cap=None if variant.soft_cap is None else float(variant.soft_cap),
        has_sinks=variant.sinks is not None,
        has_slopes=variant.alibi_slopes is not None,
        has_lse=return_lse,
        is_emulated=bool(interpret),
    )
    inputs = {
        "q": _by_kv_head(plan, q),
        "k_pages": pages.k,
        "v_pages": pages.v,
        "page_table": rows.page_table,
        "items": work_list(plan, rows.q_start, rows.kv_len),
        "sinks": _by_row(plan, variant.sinks),
        "slopes": _by_row(plan, variant.alibi_slopes),
    }
    out, *lse = _run(plan, inputs, interpret)
    return out, lse_of_tokens(plan, lse[0], rows.q_start) if lse else None


def _plan_of(tiling: HopperTiling, q, rows: RaggedRows, k_pages, **options: Any) -> HopperPlan:
    """Return what the kernel is compiled for; `options` are the fields that do not follow from
    shapes."""
    (T, N, H), (_, K, B, _), R = q.shape, k_pages.shape, rows.kv_len.shape[0]
    if not _divides(tiling.block, B):
        raise ValueError(
            f"block {tiling.block} and pages of {B} do not divide each other; use a tiling with "
            f"block {math.gcd(tiling.block, B)}"
        )
    tile = WARPGROUP_ROWS // (N // K) * tiling.warpgroups
    return HopperPlan(
        num_tokens=T,
        num_rows=R,
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        page_size=B,
        num_items=num_items(T, R, tile),
        warpgroups=tiling.warpgroups,
        block=tiling.block,
        slots=tiling.slots,
        **options,
    )


def _run(plan: HopperPlan, inputs: dict[str, Any], interpret: Any) -> list[jax.Array]:
    """Return what the kernel writes: the result and, where requested, lse as the units have it."""
    # Imported here, since Pallas' names for GPUs change between JAX's versions: where this kernel
    # is not used they need not exist.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxinfer.kernels.paged_attention import hopper_kernel

    given = [name for name, x in inputs.items() if x is not None]
    scratch = hopper_kernel.scratch_of(plan, inputs["q"].dtype)
    present = [name for name, x in scratch._asdict().items() if x is not None]

    def body(*refs: Any) -> None:
        names = [*given, "out", *(["lse"] if plan.has_lse else [])]
        global_refs = dict.fromkeys(hopper_kernel.HopperRefs._fields) | dict(
            zip(names, refs[: len(names)], strict=True)
        )
        shared_refs = dict.fromkeys(hopper_kernel.HopperScratch._fields) | dict(
            zip(present, refs[len(names) :], strict=True)
        )
        hopper_kernel.attend(
            plan,
            hopper_kernel.HopperRefs(**global_refs),
            hopper_kernel.HopperScratch(**shared_refs),
        )

    results = [
        jax.ShapeDtypeStruct((plan.num_tokens, plan.num_heads, plan.head_dim), inputs["q"].dtype)
    ]
    if plan.has_lse:
        parts = (plan.num_kv_heads, plan.num_items, plan.warpgroups, WARPGROUP_ROWS)
        results.append(jax.ShapeDtypeStruct(parts, jnp.float32))
    return plgpu.kernel(
        body,
        out_type=results,
        scratch_types=[x for x in scratch if x is not None],
        grid=(plan.num_items * plan.num_kv_heads,),
        grid_names=("unit",),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*(inputs[name] for name in given))


def _by_kv_head(plan: HopperPlan, q: jax.Array) -> jax.Array:
    """[T, N, H] -> [K, T*G, H]: a warpgroup's rows, whatever G is, are one box of a TMA copy."""
    T, K, G, H = plan.num_tokens, plan.num_kv_heads, plan.group, plan.head_dim
    return jnp.moveaxis(q.reshape(T, K, G, H), 1, 0).reshape(K, T * G, H)


def _by_row(plan: HopperPlan, per_head: jax.Array | None) -> jax.Array | None:
    """[N] -> [K, 64]: the value of each of a warpgroup's rows, in base 2."""
    if per_head is None:
        return None
    row = jnp.arange(WARPGROUP_ROWS) % plan.group
    return per_head.astype(jnp.float32).reshape(plan.num_kv_heads, -1)[:, row] * math.log2(math.e)


def _divides(block: int, page_size: int) -> bool:
    return block % page_size == 0 or page_size % block == 0


def _check_device() -> None:
    kind = device_kind()
    if not any(name in kind for name in DEVICES):
        raise NotImplementedError(f"wgmma on {kind}; it needs a Hopper GPU: {', '.join(DEVICES)}")


def _check_assembler() -> None:
    """Decline ptxas of CUDA 12.8.0 to 12.9.0, which miscompiles a causal mask between two wgmma
    (JAX's own attention kernel for Hopper refuses it)."""
    try:
        version = importlib.metadata.version(ASSEMBLER)
    except importlib.metadata.PackageNotFoundError:
        return
    parts = tuple(int(x) for x in re.findall(r"\d+", version)[:3])
    if (12, 8) <= parts < FIRST_SOUND_ASSEMBLER:
        sound = ".".join(map(str, FIRST_SOUND_ASSEMBLER))
        raise NotImplementedError(
            f"ptxas of {ASSEMBLER} {version}, which miscompiles causal masks; install {sound}"
        )


def _check(q, rows: RaggedRows, pages: KVPages) -> None:
    if pages.v is None:
        raise NotImplementedError("values are a part of the keys; it reads pages of values")
    (T, N, H), (_, K, B, lanes), R = q.shape, pages.k.shape, rows.kv_len.shape[0]
    if T <= R:
        raise NotImplementedError(
            f"a step of as many rows as tokens holds no chunk: {R} rows, {T} tokens"
        )
    if q.dtype.name not in TYPES:
        raise NotImplementedError(f"queries of {q.dtype.name}; it takes {', '.join(TYPES)}")
    for name, stored in (("k", pages.k), ("v", pages.v)):
        if stored.dtype != q.dtype or pages.k_scales is not None:
            raise NotImplementedError(
                f"{name}_pages of {stored.dtype.name} for queries of {q.dtype.name}; it takes "
                "pages of the queries' type"
            )
    if H not in HEAD_DIMS or lanes != H:
        raise NotImplementedError(
            f"head dim {H} in rows of {lanes}; it takes head dims {', '.join(map(str, HEAD_DIMS))} "
            f"in rows of their own"
        )
    if B < LEAST_PAGE or B & (B - 1):
        raise NotImplementedError(f"pages of {B}; it takes powers of two from {LEAST_PAGE}")
    if N // K > WARPGROUP_ROWS:
        raise NotImplementedError(f"{N // K} query heads a KV head; it takes {WARPGROUP_ROWS}")
