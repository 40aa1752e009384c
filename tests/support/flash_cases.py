"""Cases of flash attention, and the reference results.

Keys and values past `kv_len` are NaN.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.flash_attention import (
    BACKENDS,
    AttentionMask,
    AttentionVariant,
    flash_attention,
    gpu,
    tpu,
    xla,
)
from jaxinfer.kernels.triton_launch import interpret

TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "float16": 2e-3,
}  # bounds on ||out - ref|| / ||ref||
STATIC = ("score_mod", "return_lse", "backend")

# Emulators, in tiles small enough that a small case has several. The TPU emulator fills unwritten
# memory with NaN.
EMULATED = {
    "tpu": partial(
        tpu.flash_attention, interpret=pltpu.InterpretParams(), tiling=tpu.TpuFlashTiling(16, 128)
    ),
    "gpu": partial(
        gpu.flash_attention,
        launch=interpret,
        tiling=gpu.GpuFlashTiling(16, 16, num_warps=4, num_stages=2),
    ),
}
SMALL = {**EMULATED, "xla": partial(xla.flash_attention, tile=(16, 16))}

# Unoptimized: a program runs a few times. An offset that is an int is known while tracing.
program: Any = jax.jit(
    flash_attention,
    static_argnames=STATIC,
    compiler_options={"xla_backend_optimization_level": 0},
)


def grouped(options: dict[str, Any]) -> tuple[AttentionVariant, AttentionMask, dict[str, Any]]:
    """Return the options of a call in their groups, and the others, with arrays on the device."""
    options = {name: _array(value) for name, value in options.items()}
    take = lambda group: group(
        **{f.name: options.pop(f.name) for f in dataclasses.fields(group) if f.name in options}
    )
    return take(AttentionVariant), take(AttentionMask), options


@dataclasses.dataclass(frozen=True)
class Shape:
    rows: int = 2
    queries: int = 40
    keys: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Case:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv_len: np.ndarray | None = None


def make_case(shape: Shape | None = None, kv_len: Any = None, *, seed: int = 0) -> Case:
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    draw = lambda length, heads: rng.normal(size=(shape.rows, length, heads, shape.head_dim))
    q = draw(shape.queries, shape.heads)
    k, v = (draw(shape.keys, shape.kv_heads) for _ in range(2))
    if kv_len is not None:
        kv_len = np.asarray(kv_len, np.int32)
        for r, length in enumerate(kv_len):
            k[r, length:] = v[r, length:] = np.nan
    dtype = jnp.dtype(shape.dtype)
    return Case(q.astype(dtype), k.astype(dtype), v.astype(dtype), kv_len)


def oracle(case: Case, **variant: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) in float64, by whole matrices [R, N, T, S] in NumPy."""
    R, T, N, _ = case.q.shape
    S, K = case.k.shape[1:3]
    q, k, v = (np.asarray(x, np.float64) for x in (case.q, case.k, case.v))
    default = S - T if variant.get("causal") else 0
    offset = variant.get("q_offset")
    offset = np.broadcast_to(default if offset is None else offset, (R,)).astype(np.int32)
    row = np.arange(R, dtype=np.int32)[:, None, None, None]
    head = np.arange(N, dtype=np.int32)[:, None, None]
    p = offset[:, None, None, None] + np.arange(T, dtype=np.int32)[:, None]
    s = np.arange(S, dtype=np.int32)
    at = np.broadcast_arrays(row, head, p, s)
    length = np.full(R, S) if case.kv_len is None else case.kv_len
    is_key = s < length[:, None]  # [R, S]
    k, v = (np.where(is_key[..., None, None], x, 0).repeat(N // K, axis=2) for x in (k, v))
    z = _scores(variant, variant["scale"] * np.einsum("rtnh,rsnh->rnts", q, k), at)
    z = np.where(_is_seen(variant, at) & is_key[:, None, None], z, -np.inf)
    if variant.get("sinks") is not None:
        sinks = np.broadcast_to(variant["sinks"][:, None, None], (R, N, T, 1))
        z = np.concatenate([z, sinks], axis=-1)
    top = z.max(axis=-1, keepdims=True)
    weight = np.exp(z - np.where(np.isneginf(top), 0, top))
    total = weight.sum(axis=-1, keepdims=True)
    is_empty = total == 0
    total[is_empty] = 1
    out = np.einsum("rnts,rsnh->rtnh", (weight / total)[..., :S], v)
    lse = np.where(is_empty, -np.inf, np.where(is_empty, 0, top) + np.log(total))
    return out, lse[..., 0].swapaxes(1, 2)


def _is_seen(variant: dict[str, Any], at: tuple[np.ndarray, ...]) -> np.ndarray:
    row, _, p, s = at
    window, hidden = variant.get("window"), variant.get("hidden")
    seen = np.ones(p.shape, bool)
    if variant.get("causal"):
        seen &= s <= p
    if window is not None:
        seen &= s > p - window
    if window is not None and not variant.get("causal"):
        seen &= s < p + window
    if hidden is not None:
        for c in range(hidden.start.shape[1]):
            start, end = (np.asarray(x)[row, c, s] for x in hidden)
            seen &= ~((start <= p) & (p < end))
    if variant.get("mask_mod") is not None:
        seen &= np.asarray(variant["mask_mod"](*at))
    return seen


def _scores(variant: dict[str, Any], z: np.ndarray, at: tuple[np.ndarray, ...]) -> np.ndarray:
    _, head, p, s = at
    if variant.get("soft_cap") is not None:
        z = variant["soft_cap"] * np.tanh(z / variant["soft_cap"])
    if variant.get("alibi_slopes") is not None:
        z = z - np.asarray(variant["alibi_slopes"], np.float64)[head] * abs(p - s)
    if variant.get("score_mod") is not None:
        z = np.asarray(variant["score_mod"](z.astype(np.float32), *at), np.float64)
    return z


def run(case: Case, backend: str | None, **variant: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run the operator, compiled: (out, lse)."""
    score, mask, others = grouped({"kv_len": case.kv_len, **variant})
    arrays = (jnp.asarray(x) for x in (case.q, case.k, case.v))
    with mock.patch.dict(BACKENDS, SMALL):
        out, lse = program(*arrays, score, mask, return_lse=True, backend=backend, **others)
    return np.asarray(out), np.asarray(lse)


def _array(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def assert_close(out: np.ndarray, ref: np.ndarray, tolerance: float) -> None:
    """Compare by the norm over all, and query by query, so that a small one cannot hide."""
    out = out.astype(np.float64)
    assert np.isfinite(out).all()
    error = np.linalg.norm(out - ref) / max(np.linalg.norm(ref), 1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"
    of_query = lambda x: np.linalg.norm(x, axis=-1)
    allowed = 10 * tolerance * (of_query(ref) + of_query(ref).mean())
    wrong = np.argwhere(of_query(out - ref) > allowed)
    assert not wrong.size, f"(row, query, head) {wrong[:8].tolist()} are off"


def check(case: Case, backend: str | None, tolerance: float | None = None, **variant: Any) -> None:
    """Check that the backend agrees with the oracle, in its result and in its lse."""
    variant.setdefault("scale", case.q.shape[3] ** -0.5)
    out, lse = run(case, backend, **variant)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    ref, ref_lse = oracle(case, **variant)
    tolerance = tolerance or TOLERANCE[case.q.dtype.name]
    assert_close(out, ref, tolerance)
    is_empty = np.isneginf(ref_lse)
    assert (np.isneginf(lse) == is_empty).all() and (out[is_empty] == 0).all()
    assert np.allclose(lse[~is_empty], ref_lse[~is_empty], rtol=tolerance, atol=tolerance)


def name_of(value: Any) -> str:
    """Return a test's name that is the same in every process: without addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
