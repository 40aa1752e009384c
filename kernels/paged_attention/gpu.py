"""Paged attention for GPUs in Triton: one launch, its work in equal stretches over a fixed grid.

Decodes and chunks share the launch. A context of any length is split over as many programs as its
share of all work is worth, and they merge their parts themselves (`gpu_kernel.py`). The split
follows from the batch alone, so equal calls give equal bits. Vocabulary: `gpu_plan.py`; formula and
contract: `api.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.dispatch import device_kind, platform
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.gpu_plan import (
    GpuPagedPlan,
    num_items,
    power_of_two,
    work_list,
)
from jaxinfer.kernels.paged_attention.gpu_tiling import (
    SCALED,
    GpuPagedTiling,
    candidates,
    heuristic,
    is_wide,
    key_of,
    tiling_key,
)
from jaxinfer.kernels.paged_attention.rows import RaggedRows
from jaxinfer.kernels.triton_launch import (
    Launcher,
    TritonLaunch,
    capability_in_use,
    jax_triton,
    require_triton,
)
from jaxinfer.kernels.tuning import tuned

__all__ = ["GpuPagedTiling", "candidates", "heuristic", "paged_attention", "tiling_key"]

FLOATS = ("float32", "bfloat16", "float16")

# Multiprocessors that the interpreter on a CPU runs one after another.
INTERPRETED = 3


def paged_attention(
    q,  # [T, N, H]
    rows: RaggedRows,
    pages: KVPages,  # k, v: [P, K, B, H]
    variant: AttentionVariant,
    *,
    return_lse: bool = False,
    batch_invariant: bool = False,
    tiling: GpuPagedTiling | None = None,
    launch: Launcher = jax_triton,
):
    """Return (out [T, N, H], lse [T, N] or None).

    With `batch_invariant` no unit is cut, so that a row of one token is computed alike whatever the
    others are. Declines (`NotImplementedError`) types that it cannot read, GPUs below compute
    capability 8.0 and those of unknown size.
    """
    _check(q, pages)
    require_triton()
    from jaxinfer.kernels.paged_attention.gpu_kernel import paged_attention_kernel

    tiling = tiling or _tiling(q, rows, pages.k, variant.window)
    sinks, slopes = variant.sinks, variant.alibi_slopes
    options = {
        "scale": float(variant.scale),
        "window": variant.window,
        "soft_cap": None if variant.soft_cap is None else float(variant.soft_cap),
        "has_sinks": sinks is not None,
        "has_slopes": slopes is not None,
        "has_scales": pages.k_scales is not None,
        "has_lse": return_lse,
        "is_split": not batch_invariant,
    }
    plan = plan_of(tiling, q, pages.k, rows, **options)
    items = work_list(plan, rows.q_start, rows.kv_len)
    k: Any = pages.k
    v: Any = pages.v
    if plan.is_fp8:  # by its bits: not every GPU has the type
        k, v = (jax.lax.bitcast_convert_type(x, jnp.int8) for x in (k, v))
    # An operand that the kernel does not read is replaced by some other array.
    optional = (pages.k_scales, pages.v_scales, sinks, slopes)
    optional = (items if x is None else x.astype(jnp.float32) for x in optional)
    zeros = jnp.zeros(plan.programs, jnp.int32)
    inputs = (q, k, v, *optional, rows.q_start, rows.page_table, items, zeros)
    out, lse, *_ = launch(
        TritonLaunch(
            kernel=paged_attention_kernel,
            grid=(plan.programs,),
            inputs=inputs,
            outputs=_outputs(plan, q.dtype),
            constexprs={"plan": plan},
            num_warps=tiling.num_warps,
            num_stages=tiling.stages,
            aliases={len(inputs) - 1: 4},
        )
    )
    return out, lse if return_lse else None


def _tiling(q, rows: RaggedRows, k_pages, window) -> GpuPagedTiling:
    key = key_of(q, k_pages, rows.kv_len.shape[0], k_pages.shape[2], window)
    return tuned(heuristic(q, k_pages, rows.kv_len), "paged_attention/gpu", key)


def plan_of(tiling: GpuPagedTiling, q, k_pages, rows: RaggedRows, **options: Any) -> GpuPagedPlan:
    """Return what the kernel is compiled for; `options` are the fields that do not follow from
    shapes."""
    (T, N, H), R, W = q.shape, *rows.page_table.shape
    _, K, B, _ = k_pages.shape
    group = N // K
    if tiling.row_block < group:
        raise ValueError(
            f"row_block {tiling.row_block} holds no group of {group} heads; use a tiling of "
            f"{power_of_two(group, 16)} or more"
        )
    items = num_items(T, R, tiling.row_block // group)
    most = items * K * -(-W * B // tiling.block)  # blocks that there can be at all
    return GpuPagedPlan(
        num_tokens=T,
        num_rows=R,
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        page_size=B,
        table_width=W,
        num_items=items,
        programs=max(1, min(most, multiprocessors() * tiling.occupancy)),
        row_block=tiling.row_block,
        block=tiling.block,
        stages=tiling.stages,
        is_wide=is_wide(q, k_pages),
        is_fp8=k_pages.dtype == jnp.float8_e4m3fn,
        **options,
    )


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU that is traced for or in use. Declines a GPU
    that does not report it."""
    if platform() == "cpu":
        return INTERPRETED
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    at_hand = lambda: getattr(jax.devices()[0], "core_count", None)
    found = at_hand() if device is None else device.num_cores
    if not found:
        raise NotImplementedError(f"{device_kind()!r} does not say how many multiprocessors it has")
    return found


def _outputs(plan: GpuPagedPlan, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the result, lse (one number where it is not requested), sums and state of parts,
    counters."""
    lse = (plan.num_tokens, plan.num_heads) if plan.has_lse else (1, 1)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return (
        jax.ShapeDtypeStruct((plan.num_tokens, plan.num_heads, plan.head_dim), dtype),
        f32(*lse),
        f32(plan.programs, 2, plan.row_block, plan.lanes),
        f32(plan.programs, 2, 2, plan.row_block),
        jax.ShapeDtypeStruct((plan.programs,), jnp.int32),
    )


def _check(q, pages: KVPages) -> None:
    k_pages, v_pages = pages.k, pages.v
    if v_pages is None:
        raise NotImplementedError("values are a part of the keys; it reads pages of values")
    if q.size >= 1 << 31:
        raise NotImplementedError(f"{q.size} numbers of queries; it counts them in 32 bits")
    if q.dtype.name not in FLOATS:
        raise NotImplementedError(f"queries of {q.dtype.name}; it takes {', '.join(FLOATS)}")
    stored = (("k", k_pages, pages.k_scales), ("v", v_pages, pages.v_scales))
    for name, numbers, scales in stored:
        kind = numbers.dtype.name
        if kind not in FLOATS + SCALED:
            raise NotImplementedError(
                f"{name}_pages of {kind}; it takes {', '.join(FLOATS + SCALED)}"
            )
        if (kind in SCALED) != (scales is not None):
            raise NotImplementedError(
                f"{name}_pages of {kind} with {'no ' if scales is None else ''}{name}_scales; "
                f"{' and '.join(SCALED)} have them, others do not"
            )
    if k_pages.dtype != v_pages.dtype:
        raise NotImplementedError(
            f"k_pages of {k_pages.dtype.name} and v_pages of {v_pages.dtype.name}; not of one type"
        )
    if (capability := capability_in_use() or 80) < 80:
        raise NotImplementedError(f"compute capability {capability}; it takes 80 and later")
