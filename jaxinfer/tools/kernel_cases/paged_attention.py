"""Paged attention: decodes, and decodes beside a prefill chunk, over scattered pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.folding import rows_and_lanes
from jaxinfer.kernels.kv_pages import KVPages, NewTokens
from jaxinfer.kernels.paged_attention import AttentionVariant, RaggedRows, paged_attention
from jaxinfer.kernels.paged_attention.update import update_and_attend
from jaxinfer.tools.kernel_cases import GPU, TPU, Case, random_array, with_headlines


@dataclasses.dataclass(frozen=True)
class Heads:
    """One device's share of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    variant: tuple[tuple[str, Any], ...] = ()


LLAMA3_8B = Heads(32, 8, 128)
LLAMA3_70B_8 = Heads(8, 1, 128)  # Llama-3-70B over 8 devices
LLAMA32_1B = Heads(32, 8, 64)
SMOLLM2_135M = Heads(9, 3, 64)
QWEN25_7B = Heads(28, 4, 128)
GEMMA2_9B = Heads(16, 8, 256, (("window", 4096), ("soft_cap", 50.0)))


@dataclasses.dataclass(frozen=True)
class Batch:
    """R rows: all decode, but where `chunk` is given the last one brings that many tokens.

    Decodes stand at `length` tokens each, or where `is_ragged` at lengths from half of it up.
    """

    rows: int
    length: int
    chunk: int = 1
    is_ragged: bool = False

    @property
    def num_tokens(self) -> int:
        return self.rows - 1 + self.chunk

    @property
    def q_len(self) -> np.ndarray:
        return np.array([1] * (self.rows - 1) + [self.chunk], np.int32)

    @property
    def kv_len(self) -> np.ndarray:
        least = self.length // 2 if self.is_ragged else self.length
        return np.linspace(least, self.length, self.rows).astype(np.int32)


DECODE = Batch(64, 8192)
MIXED = Batch(64, 8192, chunk=449, is_ragged=True)  # 512 tokens
ONE_ROW = Batch(1, 8192)


def attention_case(
    heads: Heads,
    batch: Batch,
    page_size: int = 64,
    *,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    is_folded: bool = False,
    **changes: Any,
) -> Case:
    """A pool that holds every row at its longest."""
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    R, T, W = batch.rows, batch.num_tokens, -(-batch.length // page_size)
    P = R * W
    cache_dtype = jnp.dtype(cache_dtype or dtype)
    spec: Any = jax.ShapeDtypeStruct
    rows, lanes = rows_and_lanes(page_size, H) if is_folded else (page_size, H)
    stored = spec((P, K, rows, lanes), cache_dtype)
    has_scales = cache_dtype.itemsize == 1
    scales = spec((P, K, page_size), jnp.float32) if has_scales else None
    pages = KVPages(stored, stored, scales, scales)
    q = spec((T, N, H), dtype)
    i32 = lambda *shape: spec(shape, jnp.int32)
    variant = AttentionVariant(H**-0.5, **dict(heads.variant))

    def make(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        real = jax.tree.map(lambda s: random_array(rng, s), KVPages(stored, stored))
        if scales is not None:  # values of about 1 again
            of_scales = [(0.01 + 0.01 * rng.random(scales.shape, np.float32)) for _ in range(2)]
            real = real._replace(k_scales=of_scales[0], v_scales=of_scales[1])
        q_start = np.concatenate([[0], np.cumsum(batch.q_len)]).astype(np.int32)
        page_table = rng.permutation(P).astype(np.int32).reshape(R, W)
        arrays: Any = q_start, batch.kv_len, page_table  # NumPy's, until a device gets them
        ragged = RaggedRows(*arrays)
        return (random_array(rng, q), ragged, real, variant), {}

    pairs, num_cached = _work(batch, variant.window)
    token_bytes = 2 * K * (H * cache_dtype.itemsize + 4 * has_scales)
    return Case(
        function=paged_attention,
        arguments=(q, RaggedRows(i32(R + 1), i32(R), i32(R, W)), pages, variant),
        options={},
        make=make,
        bytes_moved=num_cached * token_bytes + 2 * T * N * H * jnp.dtype(dtype).itemsize,
        flops=4 * pairs * N * H,
        tolerance=2e-2 if has_scales else {"float32": 1e-5}.get(jnp.dtype(dtype).name, 1e-2),
        **changes,
    )


def update_case(heads: Heads, batch: Batch, page_size: int = 64, **changes: Any) -> Case:
    """The same step, whose new keys and values the kernel stores."""
    read = attention_case(heads, batch, page_size, **changes)
    q, *rest = read.arguments
    T, K, H = batch.num_tokens, heads.num_kv_heads, heads.head_dim
    new: Any = jax.ShapeDtypeStruct((T, K, H), q.dtype)
    token: Any = jax.ShapeDtypeStruct((T,), jnp.int32)

    def make(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (real_q, rows, *others), options = read.make(rng)
        _, kv_len, page_table, _ = rows
        row = np.repeat(np.arange(batch.rows), batch.q_len)
        behind = np.concatenate([np.arange(count, 0, -1) for count in batch.q_len])
        position = (kv_len[row] - behind).astype(np.int32)
        page = page_table[row, position // page_size]
        k, v = (random_array(rng, new) for _ in range(2))
        arrays: Any = k, v, page, position % page_size
        real_new = NewTokens(*arrays)
        return (real_q, real_new, rows, *others), options

    return dataclasses.replace(
        read,
        function=update_and_attend,
        arguments=(q, NewTokens(new, new, token, token), *rest),
        make=make,
        is_tunable=False,  # it also writes, with the tiling of the kernel that only reads
        bytes_moved=read.bytes_moved + 4 * T * K * H * new.dtype.itemsize,
    )


def _work(batch: Batch, window: int | None) -> tuple[int, int]:
    """Return the pairs of a query and a position it sees, and the cached tokens that are read."""
    pairs = num_cached = 0
    for q_len, kv_len in zip(batch.q_len.tolist(), batch.kv_len.tolist(), strict=True):
        seen = [min(p + 1, window or p + 1) for p in range(kv_len - q_len, kv_len)]
        pairs += sum(seen)
        num_cached += min(kv_len, seen[0] + q_len - 1)
    return pairs, num_cached


def torch_peer(q: Any, rows: Any, pages: KVPages, variant: AttentionVariant):
    """Return PyTorch's `scaled_dot_product_attention` over a dense cache of rows of one length:
    pages are gathered beforehand, so that it follows no table."""
    import torch.nn.functional as F

    R, N, H = q.shape
    K = pages.k.shape[1]

    def dense(stored: Any) -> Any:  # [R, K, length, H]
        by_row = stored[rows.page_table.long()].transpose(1, 2)
        return by_row.reshape(R, K, -1, H)[:, :, : int(rows.kv_len[0])].contiguous()

    k, v, queries = dense(pages.k), dense(pages.v), q.reshape(R, N, 1, H)
    return lambda: F.scaled_dot_product_attention(
        queries, k, v, scale=variant.scale, enable_gqa=True
    )


HEADLINES = (
    "llama3_8b decode",
    "llama3_8b mixed",
    "llama3_8b int8 page=128 decode",
    "llama3_70b/8 decode",
    "llama3_70b/8 mixed",
)


def cases() -> dict[str, Case]:
    peer: dict[str, Any] = {"peer": torch_peer}
    on_all: dict[str, Any] = {"backends": ("tpu", "gpu", "xla")}
    folded: dict[str, Any] = {"is_folded": True, "backends": ("tpu",), "targets": TPU}
    flat: dict[str, Any] = {"backends": ("gpu",), "targets": GPU}
    int8: dict[str, Any] = {"cache_dtype": jnp.int8}
    chunks: dict[str, Any] = {"backends": ("tpu", "gpu", "hopper")}
    on_tpu: dict[str, Any] = {"backends": ("tpu",), "targets": TPU}
    found = {
        "llama3_8b decode": attention_case(LLAMA3_8B, DECODE, **peer, **on_all),
        "llama3_8b mixed": attention_case(LLAMA3_8B, MIXED, **chunks),
        "llama3_8b update decode": update_case(LLAMA3_8B, DECODE, **on_tpu),
        "llama3_8b update mixed": update_case(LLAMA3_8B, MIXED, **on_tpu),
        "llama3_8b one row": attention_case(LLAMA3_8B, ONE_ROW, **peer),
        "llama3_8b page=16 mixed": attention_case(LLAMA3_8B, MIXED, 16),
        "llama3_8b page=128 mixed": attention_case(LLAMA3_8B, MIXED, 128),
        "llama3_8b int8 page=128 decode": attention_case(LLAMA3_8B, DECODE, 128, **int8),
        "llama3_8b int8 page=128 mixed": attention_case(LLAMA3_8B, MIXED, 128, **int8),
        "llama3_70b/8 decode": attention_case(LLAMA3_70B_8, DECODE, **peer),
        "llama3_70b/8 mixed": attention_case(LLAMA3_70B_8, MIXED, **chunks),
        "qwen2.5_7b mixed": attention_case(QWEN25_7B, MIXED, **chunks),
        "gemma2_9b mixed": attention_case(GEMMA2_9B, MIXED),
        "llama3.2_1b folded mixed": attention_case(LLAMA32_1B, MIXED, **folded),
        "llama3.2_1b folded update mixed": update_case(LLAMA32_1B, MIXED, **folded),
        "smollm2_135m folded mixed": attention_case(SMOLLM2_135M, MIXED, **folded),
        "llama3.2_1b decode": attention_case(LLAMA32_1B, DECODE, **peer, **flat),
        "smollm2_135m mixed": attention_case(SMOLLM2_135M, MIXED, **flat),
    }
    return with_headlines(found, HEADLINES)


def tiny_cases() -> dict[str, Case]:
    heads = Heads(4, 2, 16)
    flat: dict[str, Any] = {"backends": ("gpu",), "dtype": jnp.float32}
    return {
        "decode": attention_case(heads, Batch(2, 40), 16, peer=torch_peer, **flat),
        "mixed": attention_case(heads, Batch(2, 40, chunk=5), 16, **flat),
    }
