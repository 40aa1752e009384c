"""Flash attention: every backend compared with the formula."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.kernels.flash_attention import BACKENDS, ColumnIntervals
from tests.support.flash_cases import EMULATED, Shape, check, make_case
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

_marks = {"gpu": [needs_triton]}
every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=_marks.get(name, [])) for name in BACKENDS]
)
every_quick_backend = pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in EMULATED])

SINKS = np.array([0.5, -1.0, 3.0, -8.0], np.float32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


def checkered(row, head, q, k):
    """A mask that differs by row and head; some queries see nothing."""
    return ((q // 8 + k // 4 + head + row) % 3 != 0) & (q != 7)


def prefix(row, head, q, k):
    return (k <= q) | (k < 5)


def relative(score, row, head, q, k):
    """A score change made of floats and integers."""
    return score + 0.5 * jnp.tanh((q - k).astype(jnp.float32) / 8) - 0.1 * (head % 2)


def cut(score, row, head, q, k):
    return jnp.where((q + k) % 5 == 0, -jnp.inf, score * 1.5)


def documents(*ends: int, size: int = 40, rows: int = 2) -> ColumnIntervals:
    """Hide key s from the queries of later documents."""
    bounds = np.array([next(end for end in ends if s < end) for s in range(size)], np.int32)
    start = np.stack([np.minimum(bounds + r, size) for r in range(rows)])[:, None]
    return ColumnIntervals(jnp.asarray(start), jnp.full_like(start, 2**30))


def two_intervals(size: int = 40, rows: int = 2) -> ColumnIntervals:
    """Hide keys from queries long after and before; some intervals are empty."""
    s = np.arange(size, dtype=np.int32)
    start = np.stack([s + 9, np.maximum(s - 20, 0)])
    end = np.stack([np.where(s % 3 == 0, 0, s + 25), s - 3])
    stack = lambda x: jnp.asarray(np.stack([x + r for r in range(rows)]).astype(np.int32))
    return ColumnIntervals(stack(start), stack(end))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 9},
    "window of one": {"causal": True, "window": 1},
    "window to both sides": {"window": 6},
    "soft cap": {"soft_cap": 2.0, "scale": 1.0},
    "sinks": {"sinks": SINKS, "causal": True},
    "alibi": {"alibi_slopes": SLOPES},
    "offset": {"causal": True, "q_offset": 5},
    "queries before the first key": {"causal": True, "q_offset": -19},
    "an offset a row": {"causal": True, "q_offset": np.array([3, -30], np.int32), "window": 17},
    "mask_mod": {"mask_mod": checkered},
    "causal and mask_mod": {"mask_mod": checkered, "causal": True, "sinks": SINKS},
    "prefix": {"mask_mod": prefix},
    "score_mod": {"score_mod": relative},
    "score_mod to -inf": {"score_mod": cut, "mask_mod": checkered},
    "documents": {"hidden": documents(7, 21, 33, 40), "causal": True},
    "two intervals": {"hidden": two_intervals()},
    "all": {
        "scale": 0.4,
        "causal": True,
        "window": 21,
        "soft_cap": 2.5,
        "sinks": SINKS,
        "alibi_slopes": SLOPES,
        "mask_mod": checkered,
        "score_mod": relative,
        "hidden": two_intervals(),
    },
}


@pytest.mark.matrix(by=("backend", "variant"))
@every_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_the_formula(backend, variant):
    check(make_case(), backend, **VARIANTS[variant])


@every_backend
@pytest.mark.parametrize("variant", ["plain", "causal", "window to both sides", "all"])
def test_keys_past_the_length_are_ignored(backend, variant):
    check(make_case(kv_len=[33, 0]), backend, **VARIANTS[variant])


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 64), (6, 2, 80), (3, 1, 96), (4, 2, 128), (4, 1, 192), (2, 1, 256)],
)
def test_head_shapes_of_models_match_the_formula(backend, heads, kv_heads, head_dim):
    shape = Shape(1, 20, 36, heads, kv_heads, head_dim)
    check(make_case(shape), backend, causal=True)


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 50), (16, 16), (17, 15), (33, 65), (50, 3)]
)
def test_sizes_around_tiles_match_the_formula(backend, queries, keys):
    shape = Shape(1, queries, keys, 2, 1, 16)
    check(make_case(shape), backend, causal=True)
    check(make_case(shape), backend)


@every_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_match_within_their_precision(backend, dtype):
    check(make_case(Shape(dtype=dtype)), backend, **VARIANTS["all"])


@every_backend
def test_large_scores_do_not_overflow(backend):
    check(make_case(), backend, 1e-4, scale=100.0, causal=True)
    check(make_case(), backend, 1e-4, scale=100.0, sinks=200 * SINKS)


CALLS = st.fixed_dictionaries(
    {
        "q_offset": st.integers(-50, 50),
        "causal": st.booleans(),
        "window": st.sampled_from([None, 6, 21]),
    }
)


@every_quick_backend
@settings(deadline=None, max_examples=40)
@given(call=CALLS, length=st.integers(0, 37))
def test_any_offset_and_length_matches_the_formula(backend, call, length):
    case = make_case(Shape(1, 19, 37, 1, 1, 4), kv_len=[length])
    check(case, backend, **{**call, "q_offset": np.array([call["q_offset"]], np.int32)})
