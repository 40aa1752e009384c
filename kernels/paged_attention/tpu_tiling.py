"""Tilings of the TPU kernel of paged attention, and whether the compiler accepts them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxinfer.kernels.dispatch import device_kind
from jaxinfer.kernels.folding import LANES, fold_of
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.rows import RaggedRows
from jaxinfer.kernels.paged_attention.tpu_plan import IDS, TOKEN_RUN
from jaxinfer.kernels.tpu_chips import MEBI, MEGACORE, SMALL_VMEM
from jaxinfer.kernels.tuning import tuned

OPERATOR = "paged_attention/tpu"
TALL_TILES = ("TPU7x",)  # chips whose VMEM holds bfloat16 in tiles of 16 rows
SUBLANES = 8  # rows of a tile of VMEM
NARROW = ("bfloat16", "int8", "float8_e4m3fn")  # page types that bfloat16 holds exactly


@dataclasses.dataclass(frozen=True)
class TpuPagedTiling:
    """How a call is divided. Results differ by rounding alone."""

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


def heuristic(q, k_pages) -> TpuPagedTiling:
    """Return a tiling from shapes and types alone.

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
    return TpuPagedTiling(
        pages_a_block=pages,
        query_tile=min(max(1, tile // TOKEN_RUN), -(-T // TOKEN_RUN)) * TOKEN_RUN,
        cores=_cores(),
    )


def _cores() -> int:
    return 2 if device_kind() in MEGACORE else 1


def tiling_of(q, k_pages) -> TpuPagedTiling:
    """Return the measured tiling of a call, or the heuristic's."""
    return tuned(heuristic(q, k_pages), OPERATOR, _key(q, k_pages))


def tiling_key(q, rows: RaggedRows, pages: KVPages, *_: Any, **__: Any) -> str:
    """Return the key of a measured tiling for the arguments of `paged_attention`."""
    return _key(q, pages.k)


def _key(q, k_pages) -> str:
    T, N, H = q.shape
    _, K, page_rows, lanes = k_pages.shape
    B = page_rows * fold_of(lanes, H)
    return f"T={T} N={N} K={K} H={H} B={B} {q.dtype.name} {k_pages.dtype.name}"


def candidates(q, rows: RaggedRows, pages: KVPages, *_: Any, **__: Any) -> list[TpuPagedTiling]:
    """Return the tilings that a search tries for the arguments of `paged_attention`: those that
    leave the compiler as much VMEM as the heuristic has to."""
    T, _, H = q.shape
    B = pages.k.shape[2] * fold_of(pages.k.shape[3], H)
    most = -(-T // TOKEN_RUN) * TOKEN_RUN
    found = [
        TpuPagedTiling(pages_a_block, tile, slots, _cores())
        for pages_a_block in (1 << i for i in range(IDS.bit_length()))
        if pages_a_block == 1 or 128 <= pages_a_block * B <= 1024
        for tile in ((16,) if T == 1 else (16, 32, 64, 128, 256))
        if tile <= most
        for slots in (2, 3, 4)
    ]
    return [tiling for tiling in found if _refusal(tiling, q, pages.k) is None]


def is_narrow(q, k_pages) -> bool:
    """Return whether the operands of products are bfloat16; else they are float32."""
    return q.dtype == jnp.bfloat16 and k_pages.dtype.name in NARROW


def _token_bytes(q, k_pages, slots: int = 2) -> int:
    """Return the VMEM that a token of a tile of queries takes: queries in each slot and once more
    by KV head, sums with top and total, twice the result."""
    N, H, lanes = q.shape[1], q.shape[2], k_pages.shape[3]
    padded = -(-lanes // LANES) * LANES
    wide = 2 if is_narrow(q, k_pages) else 4
    copies = fold_of(lanes, H) * ((slots + 1) * wide * padded + 4 * (padded + 2 * LANES))
    return N * (copies + 2 * wide * padded)


def vmem_bytes(tiling: TpuPagedTiling, q, k_pages) -> int:
    """Return the bytes of the kernel's own arrays; the compiler adds some 10 to 25 % for spilled
    values."""
    _, K, page_rows, lanes = k_pages.shape
    row = K * -(-lanes // LANES) * LANES * k_pages.dtype.itemsize
    blocks = 2 * tiling.slots * tiling.pages_a_block * page_rows * row
    return blocks + tiling.query_tile * _token_bytes(q, k_pages, tiling.slots)


def vmem_limit(needed: int) -> int:
    """Return the VMEM that the kernel may take in all.

    On a v4 that is not the whole: XLA may keep a little at the bottom for itself (4 KiB, as seen on
    a v5p), and 16 MiB above it no longer fit.
    """
    return 15 * MEBI if device_kind() in SMALL_VMEM else max(16 * MEBI, needed * 4 // 3)


def _refusal(tiling: TpuPagedTiling, q, k_pages) -> str | None:
    room = 12 if device_kind() in SMALL_VMEM else 48
    needed = vmem_bytes(tiling, q, k_pages) / MEBI
    if needed > room:
        return f"tiles of {needed:.1f} MiB; VMEM has room for {room}: use smaller pages"
    return None


def check_mosaic(tiling: TpuPagedTiling, q, k_pages) -> None:
    """Raise `NotImplementedError` for what Mosaic cannot compile."""
    if k_pages.dtype == jnp.float16:
        raise NotImplementedError("Mosaic loads no float16; use a bfloat16 or float32 cache")
    if k_pages.shape[2] % SUBLANES:
        raise NotImplementedError(
            f"a page has {k_pages.shape[2]} rows; a DMA needs a multiple of {SUBLANES}"
        )
    if reason := _refusal(tiling, q, k_pages):
        raise NotImplementedError(reason)


def check_update(k_pages) -> None:
    """Raise `NotImplementedError` for pages that the kernel cannot store to."""
    if k_pages.shape[2] % group_rows(k_pages):
        raise NotImplementedError(
            f"a page has {k_pages.shape[2]} rows; {group_rows(k_pages)} are stored together"
        )


def group_rows(k_pages) -> int:
    """Return the rows of a page that are stored together: a tile of VMEM, which on a 7x has 16 rows
    of bfloat16; on other chips half a tile."""
    is_tall = device_kind() in TALL_TILES and k_pages.dtype.itemsize == 2
    return 2 * SUBLANES if is_tall else SUBLANES
