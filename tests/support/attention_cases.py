"""Cases of paged attention: ragged rows over scattered, poisoned pages, and the reference results.

Whatever no row may read is NaN: pages without an owner, slots past a row's length, the pages that
table entries past a row's end point to, and the queries after the last row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.folding import fold_of, unfold_scales, unfolding
from jaxinfer.kernels.kv_pages import QUANTIZED, KVPages
from jaxinfer.kernels.paged_attention import (
    BACKENDS,
    AttentionVariant,
    RaggedRows,
    gpu,
    paged_attention,
    tpu,
)
from jaxinfer.kernels.triton_launch import interpret
from tests.support.triton_bench import needs_triton

TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "float16": 2e-3,
}  # bounds on ||out - ref|| / ||ref||
STATIC = ("return_lse", "batch_invariant", "backend")

# Tests run the TPU kernel in its emulator, where unwritten memory is NaN, and the GPU kernel by
# Triton's interpreter.
EMULATED = {
    "tpu": partial(tpu.paged_attention, interpret=pltpu.InterpretParams()),
    "gpu": unfolding(partial(gpu.paged_attention, launch=interpret)),
}

# The Hopper backend takes none of these sizes; test_paged_attention_hopper.py has its own.
EVERY_BACKEND = [
    pytest.param(name, marks=needs_triton if name == "gpu" else ())
    for name in BACKENDS
    if name != "hopper"
]


def program_of(backend: str | None) -> Any:
    """Return the jitted operator; an emulator's code is compiled unoptimized, since it runs a few
    times."""
    return _unoptimized if backend in EMULATED else _attend


_attend = jax.jit(paged_attention, static_argnames=STATIC)
_unoptimized = jax.jit(
    paged_attention,
    static_argnames=STATIC,
    compiler_options={"xla_backend_optimization_level": 0},
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a program is compiled for."""

    num_tokens: int = 48  # T
    num_rows: int = 8  # R
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    table_width: int = 12
    num_pages: int = 64
    dtype: str = "float32"  # of queries
    cache_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the operator, as NumPy arrays."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    q_start: np.ndarray
    kv_len: np.ndarray
    page_table: np.ndarray
    k_scales: np.ndarray | None = None
    v_scales: np.ndarray | None = None

    @property
    def num_real(self) -> int:
        return int(self.q_start[-1])

    def arrays(self) -> tuple[jax.Array, RaggedRows, KVPages]:
        pages: Any = (self.k_pages, self.v_pages, self.k_scales, self.v_scales)
        rows: Any = (self.q_start, self.kv_len, self.page_table)
        whole: Any = (self.q, RaggedRows(*rows), KVPages(*pages))
        return jax.tree.map(jnp.asarray, whole)


VARIANT = [field.name for field in dataclasses.fields(AttentionVariant)]


def variant_of(options: dict[str, Any]) -> AttentionVariant:
    """Take the variant out of a call's options, with its arrays on the device."""
    return AttentionVariant(
        **{name: _array(options.pop(name)) for name in VARIANT if name in options}
    )


def make_case(
    rows: Sequence[tuple[int, int]], shape: Shape | None = None, *, seed: int = 0, shared: int = 0
) -> Case:
    """Return a case of rows (queries, cached tokens with them); empty rows fill up to R.

    The rows' pages are allotted at random; their first `shared` pages are the same for all.
    """
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    T, R, B, W = shape.num_tokens, shape.num_rows, shape.page_size, shape.table_width
    q = rng.normal(size=(T, shape.num_heads, shape.head_dim))
    slots = (shape.num_pages, shape.num_kv_heads, B, shape.head_dim)
    k_pages, v_pages = (np.full(slots, np.nan) for _ in range(2))

    free = rng.permutation(shape.num_pages).tolist()
    unowned = free.pop()  # stays NaN
    heads = [free.pop() for _ in range(shared)]
    page_table = np.full((R, W), unowned, np.int32)
    kv_len = np.zeros(R, np.int32)
    for r, (_, length) in enumerate(rows):
        kv_len[r] = length
        for index in range(-(-length // B)):
            page = heads[index] if index < shared else free.pop()
            page_table[r, index] = page
            end = min(B, length - index * B)
            for pages in (k_pages, v_pages):
                fresh = np.isnan(pages[page, 0, :end, 0])  # a shared page is written once
                values = rng.normal(size=pages[page, :, :end].shape)
                pages[page, :, :end] = np.where(fresh[None, :, None], values, pages[page, :, :end])
    q_len = [num_queries for num_queries, _ in rows] + [0] * (R - len(rows))
    q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    assert q_start[-1] <= T, "more queries than tokens"
    q[q_start[-1] :] = np.nan
    k_pages, k_scales = _stored(k_pages, shape.cache_dtype, rng)
    v_pages, v_scales = _stored(v_pages, shape.cache_dtype, rng)
    q = np.asarray(q, dtype=jnp.dtype(shape.dtype))
    return Case(q, k_pages, v_pages, q_start, kv_len, page_table, k_scales, v_scales)


def _stored(
    pages: np.ndarray, dtype: str, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return pages in the cache's type and their scales; what was NaN has scale NaN, or is NaN."""
    if dtype not in QUANTIZED:
        return np.asarray(pages, dtype=jnp.dtype(dtype)), None
    scales = np.abs(pages).max(axis=-1) / QUANTIZED[dtype]
    stored = pages / scales[..., None]
    stored = np.where(np.isnan(stored), rng.integers(-99, 99, stored.shape), stored)
    stored = np.rint(stored) if dtype == "int8" else stored
    return stored.astype(jnp.dtype(dtype)), scales.astype(np.float32)


def plain_pages(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values in float64, [P, K, B, H]: unfolded, and times their scales."""

    def plain(pages, scales):
        H, rows = case.q.shape[2], pages.shape[2]
        is_folded = pages.shape[3] != H
        numbers = np.asarray(pages, np.float64)
        if is_folded:
            fold = fold_of(pages.shape[3], H)
            numbers = numbers[..., : fold * H].reshape(*pages.shape[:2], rows * fold, H)
        if scales is None:
            return numbers
        if is_folded:
            scales = np.asarray(unfold_scales(jnp.asarray(scales), rows))
        return numbers * scales[..., None].astype(np.float64)

    return plain(case.k_pages, case.k_scales), plain(case.v_pages, case.v_scales)


def oracle(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    key_limit: np.ndarray | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute the formula of `api.py` literally: one query and one head at a time, in float64."""
    k_pages, v_pages = plain_pages(case)
    out, lse = np.zeros(case.q.shape), np.full(case.q.shape[:2], -np.inf)
    N, K = case.q.shape[1], k_pages.shape[1]
    B = k_pages.shape[2]
    for r in range(len(case.kv_len)):
        first, end = int(case.q_start[r]), int(case.q_start[r + 1])
        for t in range(first, end):
            p = int(case.kv_len[r]) - (end - t)
            end_of_keys = p + 1 if key_limit is None else min(p + 1, int(key_limit[r]))
            seen = [s for s in range(end_of_keys) if window is None or s > p - window]
            if not seen:
                lse[t] = -math.inf if sinks is None else sinks
                continue
            for n in range(N):
                slot = [(case.page_table[r, s // B], n // (N // K), s % B) for s in seen]
                k = np.array([k_pages[c] for c in slot])
                v = np.array([v_pages[c] for c in slot])
                z = scale * (k @ case.q[t, n].astype(np.float64))
                if soft_cap is not None:
                    z = soft_cap * np.tanh(z / soft_cap)
                if alibi_slopes is not None:
                    z = z + float(alibi_slopes[n]) * (np.array(seen) - p)
                top = max(z.max(), -math.inf if sinks is None else float(sinks[n]))
                weight = np.exp(z - top)
                total = weight.sum()
                if sinks is not None:
                    total += math.exp(float(sinks[n]) - top)
                out[t, n] = weight @ v / total
                lse[t, n] = top + math.log(total)
    return (out, lse) if return_lse else out


def run(case: Case, backend: str | None, **variant: Any) -> Any:
    """Run the operator, compiled: out, and with `return_lse` (out, lse)."""
    q, rows, pages = case.arrays()
    rows = rows._replace(key_limit=_array(variant.pop("key_limit", None)))
    of_score = variant_of(variant)
    with mock.patch.dict(BACKENDS, EMULATED):
        answer = program_of(backend)(q, rows, pages, of_score, backend=backend, **variant)
    return jax.tree.map(np.asarray, answer)


def _array(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def assert_close(out: np.ndarray, ref: np.ndarray, tolerance: float) -> None:
    """Compare by the norm over all, and token by token, so that a small one cannot hide."""
    out = out.astype(np.float64)
    assert np.isfinite(out).all()
    error = np.linalg.norm(out - ref) / max(np.linalg.norm(ref), 1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"
    of_token = lambda x: np.linalg.norm(x.reshape(len(x), -1), axis=1)
    allowed = 10 * tolerance * (of_token(ref) + of_token(ref).mean())
    wrong = np.flatnonzero(of_token(out - ref) > allowed)
    assert not wrong.size, f"tokens {wrong.tolist()} are off"


def check(case: Case, backend: str | None, tolerance: float | None = None, **variant: Any) -> None:
    """Check that the backend agrees with the oracle, and tokens of no row get zeros."""
    variant.setdefault("scale", case.q.shape[2] ** -0.5)
    out, lse = run(case, backend, return_lse=True, **variant)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    assert lse.dtype == np.float32 and lse.shape == case.q.shape[:2]
    assert (out[case.num_real :] == 0).all(), "padding"
    assert (lse[case.num_real :] == -np.inf).all(), "padding"
    variant.pop("batch_invariant", None)
    ref, ref_lse = oracle(case, return_lse=True, **variant)
    if case.num_real:
        tolerance = tolerance or TOLERANCE[case.q.dtype.name]
        assert_close(out[: case.num_real], ref[: case.num_real], tolerance)
        real = slice(case.num_real)
        is_sum = np.isfinite(ref_lse[real])
        assert (is_sum == np.isfinite(lse[real])).all(), "lse"
        off = np.abs(np.where(is_sum, lse[real], 0) - np.where(is_sum, ref_lse[real], 0)).max()
        assert off <= 10 * tolerance * max(1, np.abs(ref_lse[real][is_sum]).max()), "lse"
