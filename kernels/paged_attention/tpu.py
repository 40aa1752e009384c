"""Paged attention on TPUs: one Pallas (Mosaic) kernel for decodes and prefill chunks together.

Formula and contract: `api.py`; the kernel's body: `tpu_kernel.py`. Cost follows real lengths: a
tile of queries fetches the pages its positions can see, each once, and nothing else; rows and
tokens that are padding cost nothing. `update_and_attend` stores the step's new keys and values in
the same kernel (`tpu_update.py`).

Pages [P, K, B, H] with an H that is no multiple of 128 compile, but XLA then copies the pool
unless the program's inputs and outputs are given a row-major layout; better fold (`folding.py`).
Quantized pages compile from 8 rows up, but keep their size a multiple of 128 tokens: XLA lays the
scales of smaller ones out in another order and copies them for every call (8192 pages of 64 tokens,
8 heads, v5p: 64 MiB of temporaries; of 128 tokens: none).

Storing in the kernel takes 3 launches a layer in place of 4 (Llama-3-8B's heads, v5e, 64 rows), of
folded pages 13 fewer (20 in place of 33 with all that lies between two layers).

Measured by compiling for v4, v5e, v5p, v6e and 7x without a device (jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.folding import LANES, fold_of
from jaxinfer.kernels.kv_pages import KVPages, NewTokens
from jaxinfer.kernels.paged_attention.rows import RaggedRows
from jaxinfer.kernels.paged_attention.tpu_kernel import kernel
from jaxinfer.kernels.paged_attention.tpu_plan import IDS, MASKED, TpuPagedPlan
from jaxinfer.kernels.paged_attention.tpu_prepare import (
    copies,
    groups_of,
    lanes_of_head,
    store_ranges,
    work_list,
)
from jaxinfer.kernels.paged_attention.tpu_tiling import (
    TpuPagedTiling,
    candidates,
    check_mosaic,
    check_update,
    group_rows,
    is_narrow,
    tiling_key,
    tiling_of,
    vmem_bytes,
    vmem_limit,
)

__all__ = ["TpuPagedTiling", "candidates", "paged_attention", "tiling_key", "update_and_attend"]


def paged_attention(
    q,  # [T, N, H]
    rows: RaggedRows,
    pages: KVPages,  # k, v: [P, K, rows, lanes]
    variant: AttentionVariant,
    *,
    return_lse: bool = False,
    tiling: TpuPagedTiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Return (out [T, N, H], lse [T, N] or None). Declines (`NotImplementedError`) what Mosaic
    cannot compile."""
    if variant.value_dim is not None:
        raise NotImplementedError("values are a part of the keys; it reads pages of values")
    tiling = tiling or tiling_of(q, pages.k)
    plan = _plan(q, rows, pages, variant, tiling, has_lse=return_lse)
    return _run(plan, q, rows, pages, variant, None, tiling, interpret)[:2]


def update_and_attend(
    q,  # [T, N, H]
    new: NewTokens,
    rows: RaggedRows,
    pages: KVPages,  # k, v: [P, K, rows, lanes]
    variant: AttentionVariant,
    *,
    return_lse: bool = False,
    tiling: TpuPagedTiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Store the step's keys and values and attend: (out, lse or None, pages), the pages in place
    where they are donated.

    A token whose page is P or more is not stored but read from its row's pages; such tokens come
    first in their row. A page that takes a token must be its row's alone; its offsets past the
    row's end may be set to zero. Declines quantized pages, and what Mosaic cannot compile.
    """
    if pages.k_scales is not None or pages.v_scales is not None:
        raise NotImplementedError(
            "the kernel does not quantize what it stores: store first, then attend"
        )
    check_update(pages.k)
    tiling = tiling or tiling_of(q, pages.k)
    plan = _plan(q, rows, pages, variant, tiling, has_lse=return_lse, is_update=True)
    out, lse, k, v = _run(plan, q, rows, pages, variant, new, tiling, interpret)
    return out, lse, KVPages(k, v)


def _run(
    plan: TpuPagedPlan, q, rows: RaggedRows, pages: KVPages, variant: AttentionVariant,
    new: NewTokens | None, tiling: TpuPagedTiling, interpret,
):  # fmt: skip
    """Lay the operands out, call the kernel, take the result apart: (out, lse, new pages)."""
    T, N, H = q.shape
    lanes = pages.k.shape[3]
    if not interpret:
        check_mosaic(tiling, q, pages.k)
    num_tokens = max(T, plan.tile)
    stored, operands = None, [*pages]
    if new is not None:
        stored = store_ranges(plan, rows, new.page, pages.k.shape[0])
        operands += [groups_of(plan, rows, stored, x, pages.k) for x in (new.k, new.v)]
    sinks, slopes = variant.sinks, variant.alibi_slopes
    if sinks is not None:  # the first copy alone has it
        is_first = jnp.arange(plan.copies)[:, None] < plan.group
        sinks = jnp.where(is_first, lanes_of_head(plan, sinks), MASKED)
    operands += [sinks, None if slopes is None else lanes_of_head(plan, slopes)]
    work = work_list(plan, rows, tiling.cores, stored)
    table = jnp.pad(rows.page_table, ((0, 0), (0, -rows.page_table.shape[1] % IDS)))
    q_copies = jnp.pad(copies(plan, q, lanes), ((0, num_tokens - T), (0, 0), (0, 0)))
    vmem = vmem_bytes(tiling, q, pages.k)
    call = _call(plan, tiling, vmem, q.dtype, interpret)
    out, *rest = call(
        *work, table.reshape(-1, 1, IDS), q_copies, *(x for x in operands if x is not None)
    )
    is_real = jnp.arange(T) < rows.q_start[-1]  # the others were not written
    out = jnp.where(is_real[:, None, None], out[:T, :, :H], 0).astype(q.dtype)
    lse = None
    if plan.has_lse:
        lse = jnp.where(is_real[:, None], rest.pop(0)[:T, 0, :N], -jnp.inf)
    return out, lse, *rest


def _plan(
    q, rows: RaggedRows, pages: KVPages, variant: AttentionVariant, tiling: TpuPagedTiling, *,
    has_lse: bool, is_update: bool = False,
) -> TpuPagedPlan:  # fmt: skip
    T, N, H = q.shape
    _, K, page_rows, lanes = pages.k.shape
    tile = 1 if T == 1 else tiling.query_tile
    return TpuPagedPlan(
        num_kv_heads=K,
        group=N // K,
        fold=fold_of(lanes, H),
        head_dim=H,
        page_rows=page_rows,
        pages_a_block=tiling.pages_a_block,
        tile=tile,
        slots=tiling.slots,
        num_items=min(T, rows.kv_len.shape[0] + T // tile) + 1,
        ids_a_row=-(-rows.page_table.shape[1] // IDS),
        scale=variant.scale,
        window=variant.window,
        soft_cap=variant.soft_cap,
        compute=jnp.bfloat16 if is_narrow(q, pages.k) else jnp.float32,
        has_sinks=variant.sinks is not None,
        has_slopes=variant.alibi_slopes is not None,
        has_scales=pages.k_scales is not None,
        has_lse=has_lse,
        group_rows=group_rows(pages.k) if is_update else 0,
    )


def _scratch(plan: TpuPagedPlan, dtype, q_dtype, out_dtype, lanes: int) -> list[Any]:
    """Return VMEM, SMEM and semaphores in the order of `tpu_plan.TpuRefs`."""
    K, M, slots, num_rows = plan.num_kv_heads, plan.tile, plan.slots, plan.copies * plan.tile
    N = K * plan.group
    block = pltpu.VMEM((slots, K, plan.block_rows, lanes), dtype)
    factors = pltpu.VMEM((slots, plan.pages_a_block, K, plan.page_size), jnp.float32)
    edge, write = (pltpu.VMEM((n, K, plan.group_rows, lanes), dtype) for n in (slots, 2))
    per_row = pltpu.VMEM((K, num_rows, LANES), jnp.float32)
    semaphores = lambda n: pltpu.SemaphoreType.DMA((n,))
    found = {
        "ids": pltpu.SMEM((2, 1, IDS), jnp.int32),
        "k": block,
        "v": block,
        "k_factors": factors,
        "v_factors": factors,
        "k_edge": edge,
        "v_edge": edge,
        "k_write": write,
        "v_write": write,
        "q_tile": pltpu.VMEM((slots, M, N * plan.fold, lanes), q_dtype),
        "q_rows": pltpu.VMEM((K, num_rows, lanes), q_dtype),
        "top": per_row,
        "total": per_row,
        "acc": pltpu.VMEM((K, num_rows, lanes), jnp.float32),
        "row_slopes": per_row,
        "out_tile": pltpu.VMEM((2, M, N, lanes), out_dtype),
        "lse_tile": pltpu.VMEM((2, M, 1, _lanes_for(N)), jnp.float32),
        "ids_sem": semaphores(2),
        "kv_sem": semaphores(slots),
        "q_sem": semaphores(slots),
        "out_sem": semaphores(2),
        "edge_sem": semaphores(2),
        "group_sem": semaphores(1),
    }
    return [scratch for name, scratch in found.items() if name not in plan.absent]


def _lanes_for(num: int) -> int:
    return -(-num // LANES) * LANES


def _call(plan: TpuPagedPlan, tiling: TpuPagedTiling, vmem: int, dtype, interpret):
    """Return the `pallas_call`; operands and results in the order of `tpu_plan.TpuRefs`."""
    N = plan.num_kv_heads * plan.group
    num_prefetched, first_pages = 3, 5

    def run(*operands):
        q, k_pages, v_pages = operands[4:7]
        num_tokens, _, lanes = q.shape
        out_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        shapes = [jax.ShapeDtypeStruct((num_tokens, N, lanes), out_dtype)]
        if plan.has_lse:
            shapes.append(jax.ShapeDtypeStruct((num_tokens, 1, _lanes_for(N)), jnp.float32))
        aliases = {}
        if plan.is_update:
            aliases = {first_pages + i: len(shapes) + i for i in range(2)}
            shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_pages, v_pages)]
        num_of_heads = plan.has_sinks + plan.has_slopes
        num_in_hbm = len(operands) - num_prefetched - num_of_heads
        in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
        return pl.pallas_call(
            partial(kernel, plan),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=num_prefetched,
                grid=(tiling.cores,),
                in_specs=[in_hbm] * num_in_hbm + [in_vmem] * num_of_heads,
                out_specs=[in_hbm] * len(shapes),
                scratch_shapes=_scratch(plan, k_pages.dtype, q.dtype, out_dtype, lanes),
            ),
            out_shape=shapes,
            input_output_aliases=aliases,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",),
                vmem_limit_bytes=vmem_limit(vmem),
            ),
            interpret=interpret,
            name="paged_attention",
        )(*operands)

    return run
