"""Paged attention on TPUs: one Pallas (Mosaic) kernel for decodes and prefill chunks together.

Formula and contract: `api.py`; the kernel's body: `tpu_kernel.py`. Cost follows real lengths: a
tile of queries fetches the pages its positions can see, each once, and nothing else; rows and
tokens that are padding cost nothing.

Pages [P, K, B, H] with an H that is no multiple of 128 compile, but XLA then copies the pool
unless the program's inputs and outputs are given a row-major layout; better fold (`folding.py`).

Measured by compiling for v4, v5e, v5p, v6e and 7x without a device (jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.paged_attention.folding import LANES, fold_of
from jaxinfer.kernels.paged_attention.tpu_kernel import kernel
from jaxinfer.kernels.paged_attention.tpu_plan import IDS, MASKED, TOKEN_RUN, Plan

SMALL_VMEM = ("TPU v4",)  # 16 MiB in all; later chips have 64 or more
MEGACORE = ("TPU v4", "TPU v5", "TPU v5p")  # chips whose two cores are one device
SUBLANES = 8  # rows of a tile of VMEM
MEBI = 2**20


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a call is cut. Results differ by rounding alone."""

    pages_a_block: int  # a divisor of IDS; a block is one step of the softmax
    query_tile: int  # tokens of a prefill chunk that walk the pages together, by TOKEN_RUN
    slots: int = 2  # blocks in VMEM: one computed, the others on their way
    cores: int = 1  # parts that the call is split into, to run at the same time

    def __post_init__(self):
        if self.query_tile % TOKEN_RUN or self.query_tile < 1:
            raise ValueError(f"query_tile {self.query_tile} is no multiple of {TOKEN_RUN}")
        if self.pages_a_block < 1 or IDS % self.pages_a_block:
            raise ValueError(f"pages_a_block {self.pages_a_block} does not divide {IDS}")
        if self.slots < 2 or self.cores < 1:
            raise ValueError(f"slots {self.slots} must be 2 or more, cores {self.cores} 1 or more")


def heuristic(q, k_pages) -> Tiling:
    """A tiling from shapes and types alone: arrays as `paged_attention` takes them.

    Blocks of about 1 MiB of keys, at most 512 tokens: enough to hide a DMA's latency (about a
    microsecond, in which a v6e moves 1.6 MB), and four of them fit. Tiles of about 256 rows a KV
    head: two passes of a 128-row matrix unit, and above the ratio of arithmetic to bytes at which
    it and not the memory is the limit (240 on a v5e); fewer if VMEM (16 MiB by default) is short.
    """
    T, N, H = q.shape
    _, K, page_rows, lanes = k_pages.shape
    fold, padded = fold_of(lanes, H), -(-lanes // LANES) * LANES
    page_size = page_rows * fold
    token_bytes = K * padded * k_pages.dtype.itemsize // fold
    pages = max(1, min(512, MEBI // token_bytes) // page_size)
    pages = 1 << min(IDS, pages).bit_length() - 1

    left = max(0, 12 * MEBI - 4 * pages * page_size * token_bytes)
    tile = min(128, 256 * K // N, min(6 * MEBI, left) // _token_bytes(q, k_pages))
    return Tiling(
        pages_a_block=pages,
        query_tile=min(max(1, tile // TOKEN_RUN), -(-T // TOKEN_RUN)) * TOKEN_RUN,
        cores=2 if device_kind() in MEGACORE else 1,
    )


def _token_bytes(q, k_pages, slots: int = 2) -> int:
    """VMEM that a token of a tile of queries takes: queries in each slot and once more by KV head,
    sums with top and total, twice the result."""
    N, H, lanes = q.shape[1], q.shape[2], k_pages.shape[3]
    padded = -(-lanes // LANES) * LANES
    wide = 2 if q.dtype == k_pages.dtype == jnp.bfloat16 else 4
    copies = fold_of(lanes, H) * ((slots + 1) * wide * padded + 4 * (padded + 2 * LANES))
    return N * (copies + 2 * wide * padded)


def vmem_bytes(tiling: Tiling, q, k_pages) -> int:
    """What the kernel's own arrays take; the compiler adds some 10 to 25 % for spilled values."""
    _, K, page_rows, lanes = k_pages.shape
    row = K * -(-lanes // LANES) * LANES * k_pages.dtype.itemsize
    blocks = 2 * tiling.slots * tiling.pages_a_block * page_rows * row
    return blocks + tiling.query_tile * _token_bytes(q, k_pages, tiling.slots)


def paged_attention(
    q,  # [T, N, H]
    k_pages,  # [P, K, B, H]
    v_pages,  # [P, K, B, H]
    q_start,  # [R+1]
    kv_len,  # [R]
    page_table,  # [R, W]
    *,
    scale,
    window,
    soft_cap,
    sinks,  # [N] or None
    alibi_slopes,  # [N] or None
    tiling: Tiling | None = None,
    interpret: Any = False,  # for tests: pltpu.InterpretParams()
):
    """Declines (`NotImplementedError`) what Mosaic cannot compile."""
    T, N, H = q.shape
    _, K, page_rows, lanes = k_pages.shape
    fold = fold_of(lanes, H)
    tiling = tiling or heuristic(q, k_pages)
    if not interpret:
        _check_mosaic(tiling, q, k_pages)
    tile = 1 if T == 1 else tiling.query_tile
    num_tokens = max(T, tile)
    is_narrow = q.dtype == k_pages.dtype == jnp.bfloat16
    plan = Plan(
        num_kv_heads=K,
        group=N // K,
        fold=fold,
        head_dim=H,
        page_rows=page_rows,
        pages_a_block=tiling.pages_a_block,
        tile=tile,
        slots=tiling.slots,
        num_items=min(T, kv_len.shape[0] + T // tile) + 1,
        ids_a_row=-(-page_table.shape[1] // IDS),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        compute=jnp.bfloat16 if is_narrow else jnp.float32,
    )
    items, core_first, core_steps = _work_list(plan, q_start, kv_len, tiling.cores)
    ids = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % IDS))).reshape(-1, 1, IDS)
    q_copies = jnp.pad(_copies(plan, q, lanes), ((0, num_tokens - T), (0, 0), (0, 0)))
    slopes = None if alibi_slopes is None else _lanes_of_head(plan, alibi_slopes)
    if sinks is not None:  # the first copy alone has it
        is_first = jnp.arange(plan.copies)[:, None] < plan.group
        sinks = jnp.where(is_first, _lanes_of_head(plan, sinks), MASKED)
    of_heads = (sinks, slopes)
    vmem = vmem_bytes(tiling, q, k_pages)
    out = _call(plan, tiling, vmem, q.dtype, interpret, of_heads)(
        items, core_first, core_steps, ids, q_copies, k_pages, v_pages,
        *(x for x in of_heads if x is not None),
    )  # fmt: skip
    is_real = jnp.arange(T) < q_start[-1]  # nobody wrote the others
    return jnp.where(is_real[:, None, None], out[:T, :, :H], 0).astype(q.dtype)


def _check_mosaic(tiling: Tiling, q, k_pages) -> None:
    if k_pages.dtype == jnp.float16:
        raise NotImplementedError("Mosaic loads no float16; use a bfloat16 or float32 cache")
    if k_pages.shape[2] % SUBLANES:
        raise NotImplementedError(
            f"a page has {k_pages.shape[2]} rows; a DMA needs a multiple of {SUBLANES}"
        )
    room = 12 if device_kind() in SMALL_VMEM else 48
    needed = vmem_bytes(tiling, q, k_pages) / MEBI
    if needed > room:
        raise NotImplementedError(
            f"tiles of {needed:.1f} MiB; VMEM has room for {room}: use smaller pages"
        )


def _work_list(plan: Plan, q_start, kv_len, cores: int):
    """The items [6 * I], an empty one last, and each core's first item and number of blocks.

    A core gets a run of items whose blocks are about its share of all.
    """
    R, S = kv_len.shape[0], plan.block_len
    tiles = pl.cdiv(jnp.diff(q_start), plan.tile)
    ends = jnp.cumsum(tiles)
    index = jnp.arange(plan.num_items, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    is_item, row = row < R, jnp.minimum(row, R - 1)
    first = q_start[row] + (index - (ends - tiles)[row]) * plan.tile
    count = jnp.minimum(q_start[row + 1] - first, plan.tile)
    position = kv_len[row] - (q_start[row + 1] - first)
    oldest = 0 if plan.window is None else jnp.maximum(position - plan.window + 1, 0)
    block = jnp.broadcast_to(oldest // S, index.shape)
    end_block = (position + count - 1) // S + 1
    fields = (row, first, count, position, block, end_block)
    items = [jnp.where(is_item, x, 0).astype(jnp.int32) for x in fields]

    num_blocks = items[-1] - items[-2]
    steps = jnp.cumsum(num_blocks)  # up to and with each item
    shares = jnp.arange(1, cores, dtype=jnp.int32) * pl.cdiv(steps[-1], cores)
    middles = 2 * steps - num_blocks  # an item goes where its middle lies
    bounds = jnp.searchsorted(middles, 2 * shares, method="compare_all").astype(jnp.int32)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.minimum(bounds, ends[-1]), ends[-1:]])
    steps_before = jnp.concatenate([jnp.zeros(1, jnp.int32), steps])[bounds]
    return jnp.concatenate(items), bounds[:-1], jnp.diff(steps_before)


def _copies(plan: Plan, q, lanes: int):
    """[T, N, H] -> [T, fold * N, L]: by KV head, copy, head of the group (`tpu_kernel.py`)."""
    T, N, H = q.shape
    q = q.astype(plan.compute).reshape(T, plan.num_kv_heads, plan.group, H)
    in_lanes = lambda j: [(0, 0)] * 3 + [(j * H, lanes - (j + 1) * H)]
    copies = [jnp.pad(q, in_lanes(j)) for j in range(plan.fold)]
    return jnp.stack(copies, axis=2).reshape(T, plan.fold * N, lanes)


def _lanes_of_head(plan: Plan, x):
    """[N] -> [K, fold * G, 128], equal in all lanes."""
    x = x.astype(jnp.float32).reshape(plan.num_kv_heads, 1, plan.group, 1)
    shape = (plan.num_kv_heads, plan.fold, plan.group, LANES)
    return jnp.broadcast_to(x, shape).reshape(plan.num_kv_heads, plan.copies, LANES)


def _call(plan: Plan, tiling: Tiling, vmem: int, dtype, interpret, of_heads):
    """The `pallas_call`; operands in the order of `tpu_plan.Refs`."""
    K, M, slots = plan.num_kv_heads, plan.tile, plan.slots
    N = K * plan.group
    sinks, slopes = of_heads

    def run(items, core_first, core_steps, ids, q, k_pages, v_pages, *rest):
        lanes, num_rows = q.shape[2], plan.copies * M
        out_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        block = (slots, K, plan.block_rows, lanes)
        scratch = [
            pltpu.SMEM((2, 1, IDS), jnp.int32),
            pltpu.VMEM(block, k_pages.dtype),
            pltpu.VMEM(block, v_pages.dtype),
            pltpu.VMEM((slots, M, N * plan.fold, lanes), q.dtype),
            pltpu.VMEM((K, num_rows, lanes), q.dtype),
            pltpu.VMEM((K, num_rows, LANES), jnp.float32),
            pltpu.VMEM((K, num_rows, LANES), jnp.float32),
            pltpu.VMEM((K, num_rows, lanes), jnp.float32),
            *([] if slopes is None else [pltpu.VMEM((K, num_rows, LANES), jnp.float32)]),
            pltpu.VMEM((2, M, N, lanes), out_dtype),
            *(pltpu.SemaphoreType.DMA((n,)) for n in (2, slots, slots, 2)),
        ]
        in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
        return pl.pallas_call(
            partial(kernel, plan, (sinks is not None, slopes is not None)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(tiling.cores,),
                in_specs=[in_hbm] * 4 + [in_vmem] * len(rest),
                out_specs=in_hbm,
                scratch_shapes=scratch,
            ),
            out_shape=jax.ShapeDtypeStruct((q.shape[0], N, lanes), out_dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",),
                vmem_limit_bytes=max(16 * MEBI, vmem * 4 // 3),
            ),
            interpret=interpret,
            name="paged_attention",
        )(items, core_first, core_steps, ids, q, k_pages, v_pages, *rest)

    return run
