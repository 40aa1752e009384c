"""Cases of paged attention: ragged rows over scattered, poisoned pages, and their true answer.

Whatever no row may read is NaN: pages that nobody owns, cells past a row's length, the pages that
table entries past a row's end point to, and the queries behind the last row.
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
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.paged_attention import BACKENDS, paged_attention, tpu

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}  # on ||out - ref|| / ||ref||
STATIC = ("scale", "window", "soft_cap", "batch_invariant", "backend")

# Tests run the TPU's kernel in its emulator, where memory that nobody wrote is NaN.
EMULATED = {"tpu": partial(tpu.paged_attention, interpret=pltpu.InterpretParams())}


def program_of(backend: str | None) -> Any:
    """The jitted front door. An emulator's code is compiled in haste: it runs a few times."""
    return _in_haste if backend in EMULATED else _attend


_attend = jax.jit(paged_attention, static_argnames=STATIC)
_in_haste = jax.jit(
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
    """Arguments of the front door, as NumPy arrays."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    q_start: np.ndarray
    kv_len: np.ndarray
    page_table: np.ndarray

    @property
    def num_real(self) -> int:
        return int(self.q_start[-1])

    def arrays(self) -> tuple[jax.Array, ...]:
        fields = dataclasses.fields(self)
        return tuple(jnp.asarray(getattr(self, field.name)) for field in fields)


def make_case(
    rows: Sequence[tuple[int, int]], shape: Shape | None = None, *, seed: int = 0, shared: int = 0
) -> Case:
    """A case of rows (queries, cached tokens with them); empty rows fill up to R.

    The rows' pages are dealt out at random; of their first `shared` pages, all use the same.
    """
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    T, R, B, W = shape.num_tokens, shape.num_rows, shape.page_size, shape.table_width
    q = rng.normal(size=(T, shape.num_heads, shape.head_dim))
    cells = (shape.num_pages, shape.num_kv_heads, B, shape.head_dim)
    k_pages, v_pages = (np.full(cells, np.nan) for _ in range(2))

    free = rng.permutation(shape.num_pages).tolist()
    nobodys = free.pop()  # stays NaN
    heads = [free.pop() for _ in range(shared)]
    page_table = np.full((R, W), nobodys, np.int32)
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
    of_cache = partial(np.asarray, dtype=jnp.dtype(shape.cache_dtype))
    q = np.asarray(q, dtype=jnp.dtype(shape.dtype))
    return Case(q, of_cache(k_pages), of_cache(v_pages), q_start, kv_len, page_table)


def oracle(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> np.ndarray:
    """The formula of `api.py`, read word for word: one query and one head at a time, float64."""
    out = np.zeros(case.q.shape)
    N, K = case.q.shape[1], case.k_pages.shape[1]
    B = case.k_pages.shape[2]
    for r in range(len(case.kv_len)):
        first, end = int(case.q_start[r]), int(case.q_start[r + 1])
        for t in range(first, end):
            p = int(case.kv_len[r]) - (end - t)
            seen = [s for s in range(p + 1) if window is None or s > p - window]
            for n in range(N):
                cell = [(case.page_table[r, s // B], n // (N // K), s % B) for s in seen]
                k = np.array([case.k_pages[c] for c in cell], np.float64)
                v = np.array([case.v_pages[c] for c in cell], np.float64)
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
    return out


def run(case: Case, backend: str | None, **variant: Any) -> np.ndarray:
    """The front door's answer, compiled."""
    variant = {name: _array(value) for name, value in variant.items()}
    with mock.patch.dict(BACKENDS, EMULATED):
        return np.asarray(program_of(backend)(*case.arrays(), backend=backend, **variant))


def _array(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def assert_close(out: np.ndarray, ref: np.ndarray, tolerance: float) -> None:
    """By the norm over all, and token by token so that a small one cannot hide."""
    out = out.astype(np.float64)
    assert np.isfinite(out).all()
    error = np.linalg.norm(out - ref) / max(np.linalg.norm(ref), 1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"
    of_token = lambda x: np.linalg.norm(x.reshape(len(x), -1), axis=1)
    allowed = 10 * tolerance * (of_token(ref) + of_token(ref).mean())
    wrong = np.flatnonzero(of_token(out - ref) > allowed)
    assert not wrong.size, f"tokens {wrong.tolist()} are off"


def check(case: Case, backend: str | None, tolerance: float | None = None, **variant: Any) -> None:
    """The backend agrees with the oracle, and tokens of no row get zeros."""
    variant.setdefault("scale", case.q.shape[2] ** -0.5)
    out = run(case, backend, **variant)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    assert (out[case.num_real :] == 0).all(), "padding"
    variant.pop("batch_invariant", None)
    ref = oracle(case, **variant)
    if case.num_real:
        tolerance = tolerance or TOLERANCE[case.q.dtype.name]
        assert_close(out[: case.num_real], ref[: case.num_real], tolerance)
