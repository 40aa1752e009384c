"""Rotary embedding and cache write: every backend compared with the formula, with poisoned
memory."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.folding import rows_and_lanes, unfold, unfold_scales
from jaxinfer.kernels.kv_pages import QUANTIZED, KVPages, NewTokens, write
from jaxinfer.kernels.rope_and_write import BACKENDS, gpu, rope_and_write, tpu
from jaxinfer.kernels.rotary import rotate
from jaxinfer.kernels.triton_launch import interpret
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

# The TPU kernel runs in its emulator, the GPU kernel in Triton's interpreter.
EMULATED = {
    "tpu": partial(tpu.rope_and_write, interpret=pltpu.InterpretParams()),
    "gpu": partial(gpu.rope_and_write, launch=interpret),
}
ALL = [pytest.param(b, marks=needs_triton if b == "gpu" else ()) for b in BACKENDS]
every_backend = pytest.mark.parametrize("backend", ALL)
every_folding_backend = pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "gpu"])
# Bounds on ||out - ref|| / ||ref||, by the type that is stored.
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3, "int8": 2e-2, "float8_e4m3fn": 4e-2}

# Unoptimized, and with the roundings of the formula, which XLA may leave out.
_run: Any = jax.jit(
    rope_and_write,
    static_argnames="backend",
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_allow_excess_precision": False,
    },
)


@pytest.fixture(autouse=True, scope="module")
def emulate():
    with mock.patch.dict(BACKENDS, EMULATED):
        yield


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a program is compiled for."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    half: int | None = 16  # None: nothing is rotated
    page_size: int = 32
    num_pages: int = 7
    dtype: str = "float32"
    cache_dtype: str = "float32"
    is_folded: bool = False


# Rows of a step: (page, first offset, tokens); page 7 and beyond are not stored.
ROWS = [(3, 5, 1), (0, 31, 1), (9, 0, 2), (5, 0, 13), (7, 13, 1), (1, 0, 32), (6, 17, 9)]


def make_case(shape: Shape, rows=ROWS, *, num_tokens: int = 64, seed: int = 0) -> tuple[Any, ...]:
    """Return the operator's arguments. The pages are full of other numbers; a token that is not
    stored, such as those past the last row, is NaN in `k` and `v`."""
    rng = np.random.default_rng(seed)
    slots = [(page, first + i) for page, first, count in rows for i in range(count)]
    slots += [(shape.num_pages, 0)] * (num_tokens - len(slots))
    page, offset = np.array(slots, np.int32).reshape(-1, 2).T
    T, N, K, H = len(page), shape.num_heads, shape.num_kv_heads, shape.head_dim
    normal = lambda *dims: rng.normal(size=dims)
    q, k, v = normal(T, N, H), normal(T, K, H), 3 * normal(T, K, H)
    k[page >= shape.num_pages] = v[page >= shape.num_pages] = np.nan
    angle = np.zeros((T, 0)) if shape.half is None else 3 * normal(T, shape.half)
    rotary_arrays = [jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin)]
    q, k, v = (jnp.asarray(x, jnp.dtype(shape.dtype)) for x in (q, k, v))

    rows_, lanes = (shape.page_size, H)
    if shape.is_folded:
        rows_, lanes = rows_and_lanes(shape.page_size, H)
    stored = [normal(shape.num_pages, K, rows_, lanes) for _ in range(2)]
    if shape.is_folded:  # zeros after the heads of a row of lanes
        for pages in stored:
            pages[..., lanes // H * H :] = 0
    scales: list[Any] = [None, None]
    if shape.cache_dtype in QUANTIZED:
        stored = [20 * x for x in stored]
        scales = [
            jnp.asarray(rng.random((shape.num_pages, K, shape.page_size)), jnp.float32)
            for _ in range(2)
        ]
    pages = KVPages(*(jnp.asarray(x).astype(shape.cache_dtype) for x in stored), *scales)
    rotary = None if shape.half is None else tuple(rotary_arrays)
    return q, NewTokens(k, v, jnp.asarray(page), jnp.asarray(offset)), rotary, pages


def rotated(x, cos, sin) -> np.ndarray:
    """Compute the formula in float64, a pair at a time, rounded to x's type."""
    out = np.asarray(x, np.float64).copy()
    if cos is not None:
        c, s = np.asarray(cos, np.float64)[:, None], np.asarray(sin, np.float64)[:, None]
        wide, half = out.copy(), cos.shape[1]
        for i in range(half):
            out[..., i] = wide[..., i] * c[..., i] - wide[..., i + half] * s[..., i]
            out[..., i + half] = wide[..., i + half] * c[..., i] + wide[..., i] * s[..., i]
    return out


def real_values(stored, scales, head_dim: int) -> np.ndarray:
    """Return [P, K, B, H] in float64, whatever the layout."""
    if stored.shape[3] != head_dim and scales is not None:
        scales = unfold_scales(scales, stored.shape[2])
    if stored.shape[3] != head_dim:
        stored = unfold(stored, head_dim)
    wide = np.asarray(stored.astype(jnp.float32), np.float64)
    return wide if scales is None else wide * np.asarray(scales, np.float64)[..., None]


def assert_close(out: Any, ref: np.ndarray, tolerance: float) -> None:
    """Compare head by head."""
    assert out.shape == ref.shape and np.isfinite(out).all()
    error = np.linalg.norm(out - ref, axis=-1) / np.linalg.norm(ref, axis=-1)
    assert error.size == 0 or error.max() <= tolerance, f"relative error {error.max():.2e}"


def check(case: tuple[Any, ...], backend: str) -> None:
    """Check that queries are rotated, that stored heads are the new ones within their type's
    precision, and that all other slots and scales are unchanged, bit for bit."""
    q, (k, v, page, offset), rotary, pages = case
    cos, sin = rotary or (None, None)
    H, P = q.shape[2], pages.k.shape[0]
    out, after = _run(*case, backend=backend)
    assert out.dtype == q.dtype and jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, pages)
    assert_close(np.asarray(out, np.float64), rotated(q, cos, sin), TOLERANCE[q.dtype.name])

    is_stored = np.asarray(page) < P
    at = np.asarray(page)[is_stored], slice(None), np.asarray(offset)[is_stored]
    tolerance = max(TOLERANCE[pages.k.dtype.name], TOLERANCE[k.dtype.name])
    for name, new, scale_name in (("k", rotated(k, cos, sin), "k_scales"), ("v", v, "v_scales")):
        old, now = getattr(pages, name), getattr(after, name)
        old_scales, scales = getattr(pages, scale_name), getattr(after, scale_name)
        assert now.dtype == old.dtype
        real = real_values(now, scales, H)
        assert_close(real[at], np.asarray(new, np.float64)[is_stored], tolerance)
        untouched = real_values(old, old_scales, H)
        untouched[at] = real[at]
        assert np.array_equal(untouched, real), "slots of other tokens"
        if now.shape[3] % H:
            assert not now[..., now.shape[3] // H * H :].any(), "lanes after the heads"


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("float32", "int8"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
    ],
)
def test_types_match_the_formula(backend, dtype, cache_dtype):
    check(make_case(Shape(dtype=dtype, cache_dtype=cache_dtype)), backend)


HEADS = {
    "one KV head": Shape(num_heads=8, num_kv_heads=1),
    "odd heads": Shape(num_heads=9, num_kv_heads=3, head_dim=64, half=32, cache_dtype="int8"),
    "partial rotary": Shape(head_dim=80, half=16, cache_dtype="int8"),
    "partial rotary, odd": Shape(head_dim=64, half=12),
    "half no power of two": Shape(head_dim=96, half=48),
    "wide": Shape(num_heads=2, num_kv_heads=2, head_dim=256, half=128, cache_dtype="int8"),
    "write alone": Shape(half=None),
    "write alone, quantized": Shape(half=None, cache_dtype="int8"),
}


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize("heads", HEADS)
def test_head_shapes_of_models_match_the_formula(backend, heads):
    check(make_case(HEADS[heads]), backend)


EDGES = {
    "nothing is stored": [(100, 0, 5), (7, 31, 1)],
    "a whole page": [(4, 0, 32)],
    "the last slot of the last page": [(7, 0, 3), (6, 31, 1)],
    "stored behind a prefix that is not": [(7, 0, 20), (5, 20, 3), (2, 0, 1)],
    "every page": [(p, 8 * (p % 4), 9 if p % 4 < 3 else 8) for p in (6, 1, 5, 0, 2, 4, 3)],
    "two rows in one page": [(3, 1, 2), (3, 9, 2), (3, 30, 1)],
}


@pytest.mark.matrix(by=("backend", "edge"))
@every_backend
@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_match_the_formula(backend, edge):
    check(make_case(Shape(cache_dtype="int8"), EDGES[edge]), backend)
    check(make_case(Shape(dtype="bfloat16", cache_dtype="bfloat16"), EDGES[edge]), backend)


@every_backend
def test_steps_of_one_token_match_the_formula(backend):
    shape = Shape(dtype="bfloat16", cache_dtype="bfloat16")
    for row in ((2, 31, 1), (0, 0, 1), (7, 0, 1)):
        check(make_case(shape, [row], num_tokens=1), backend)


FOLDED = {
    "two tokens a row": Shape(head_dim=64, half=32, cache_dtype="bfloat16"),
    "two tokens a row, quantized": Shape(head_dim=64, half=32, cache_dtype="int8"),
    "four tokens a row": Shape(head_dim=32, half=16),
    "one, padded": Shape(head_dim=80, half=40, cache_dtype="int8"),
}


@every_folding_backend
@pytest.mark.parametrize("fold", FOLDED)
def test_folded_pages_match_the_formula(backend, fold):
    shape = dataclasses.replace(FOLDED[fold], page_size=64, is_folded=True)
    check(make_case(shape), backend)
    check(make_case(shape, [(7, 0, 3), (5, 3, 1), (6, 1, 40), (0, 63, 1)]), backend)


@every_backend
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_zero_heads_have_scale_one(backend, cache_dtype):
    dtype = "float32" if cache_dtype == "int8" else "bfloat16"
    q, new, *rest = make_case(Shape(dtype=dtype, cache_dtype=cache_dtype), [(2, 4, 3)])
    new = new._replace(v=new.v.at[1, 0].set(0))
    _, after = _run(q, new, *rest, backend=backend)
    assert after.v_scales[2, 0, 5] == 1 and not after.v[2, 0, 5].astype(jnp.float32).any()
    assert after.v_scales[2, 1, 5] < 1


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_equals_rotate_and_write_bit_for_bit(dtype, cache_dtype):
    case = make_case(Shape(dtype=dtype, cache_dtype=cache_dtype))

    @jax.jit
    def apart(q, new, rotary, pages):
        return rotate(q, *rotary), write(pages, new._replace(k=rotate(new.k, *rotary)))

    fused: Any = jax.jit(partial(rope_and_write, backend="xla"))
    for one, other in zip(*map(jax.tree.leaves, (fused(*case), apart(*case))), strict=True):
        assert one.dtype == other.dtype and jnp.array_equal(one, other)


def test_write_is_in_place_under_donation():
    spec: Any = jax.ShapeDtypeStruct
    stored = spec((4096, 2, 8, 128), jnp.float32)
    pages = KVPages(stored, stored)
    tokens, ids = spec((16, 2, 128), jnp.float32), spec((16,), jnp.int32)
    angles = spec((16, 64), jnp.float32)
    program: Any = jax.jit(partial(rope_and_write, backend="xla"), donate_argnums=3)
    args = (tokens, NewTokens(tokens, tokens, ids, ids), (angles, angles), pages)
    memory = program.lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 4096 * 2 * 8 * 128 * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 100


def test_arguments_that_do_not_fit_are_refused(monkeypatch):
    """The operator's own checks refuse them; in tests, jaxtyping's come before them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    q, new, rotary, pages = make_case(Shape(), num_tokens=2, rows=[(3, 5, 2)])
    with pytest.raises(ValueError, match=r"cos \(2, 16\) and sin \(2, 8\) differ in shape"):
        rope_and_write(q, new, (rotary[0], rotary[1][:, :8]), pages)
    with pytest.raises(ValueError, match="cos has 24 angles; heads of 32 take 1 to 16"):
        wide = jnp.ones((2, 24))
        rope_and_write(q, new, (wide, wide), pages)
    with pytest.raises(ValueError, match="k has 1 heads of 32; pages"):
        rope_and_write(q, new._replace(k=new.k[:, :1], v=new.v[:, :1]), rotary, pages)
    with pytest.raises(ValueError, match="float32 pages have no k_scales"):
        scaled = pages._replace(k_scales=jnp.ones((7, 2, 32)))
        rope_and_write(q, new, rotary, scaled)
    with pytest.raises(ValueError, match="int8 pages need k_scales"):
        bare = KVPages(pages.k.astype(jnp.int8), pages.v.astype(jnp.int8))
        rope_and_write(q, new, rotary, bare)
    with pytest.raises(ValueError, match="pages of keys are float32"):
        mixed = pages._replace(v=pages.v.astype(jnp.bfloat16))
        rope_and_write(q, new, rotary, mixed)
