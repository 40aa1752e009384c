"""Paged attention's contract other than its numbers: cost, writes in place, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.kv_pages import KVPages, write_pages
from jaxinfer.kernels.paged_attention import (
    BACKENDS,
    AttentionVariant,
    RaggedRows,
    api,
    paged_attention,
    xla,
)
from tests.support.attention_cases import Shape, make_case, run

ROWS = [(1, 33), (7, 40), (0, 0), (20, 20)]


@pytest.fixture
def walks(monkeypatch):
    """Record [first, end) of every loop, and run the outer ones in Python; use without jit."""
    noted: list[tuple[int, int]] = []

    def fori_loop(first, end, body, carry):
        noted.append((int(first), int(end)))
        if len(carry) == 2:  # a loop over tiles; a walk over pages, with three, need not be run
            for i in range(int(first), int(end)):
                carry = body(i, carry)
        return carry

    monkeypatch.setattr(jax.lax, "fori_loop", fori_loop)
    return noted


def test_xla_cost_follows_real_lengths(walks):
    """The xla backend reads the blocks that a row can see, however large T, R and W are."""
    shape = Shape(num_rows=20, num_tokens=40, table_width=300, num_pages=350)
    walk = partial(paged_attention, backend="xla")

    def loops(rows, **variant) -> list[tuple[int, int]]:
        """Return the loops in order: decode tiles, a walk for each, chunk tiles, a walk for
        each."""
        walks.clear()
        walk(*make_case(rows, shape).arrays(), AttentionVariant(0.25, **variant))
        return walks[:]

    assert loops([]) == [(0, 0), (0, 0)], "no row, no iteration"
    block = xla.DECODE_BLOCK
    assert loops([(1, 1)]) == [(0, 1), (0, 1), (0, 0)]
    assert loops([(1, 3 * block)]) == [(0, 1), (0, 3), (0, 0)]
    assert loops([(1, 3 * block + 1)]) == [(0, 1), (0, 4), (0, 0)]
    # Longest first: rows after the first iteration do not walk with the long one.
    many = [(1, 1)] * 9 + [(1, 4000)] + [(1, 2)] * 10
    assert loops(many) == [(0, 2), (0, -(-4000 // block)), (0, 1), (0, 0)]
    # A window skips the blocks before it: positions up to 3989 are out of sight.
    assert loops([(1, 4000)], window=10) == [(0, 1), (3990 // block, 63), (0, 0)]
    chunk = xla.CHUNK_BLOCK
    assert loops([(2, chunk), (2, chunk + 1)]) == [(0, 0), (0, 2), (0, 1), (0, 2)]
    assert loops([(2, 4000)], window=10) == [(0, 0), (0, 1), (3989 // chunk, 16)]


SLOTS = st.tuples(st.integers(0, 7), st.integers(0, 3))  # pages 6 and 7 do not exist


@settings(deadline=None, max_examples=50)
@given(
    slots=st.lists(SLOTS, min_size=5, max_size=5, unique=True),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_write_pages_changes_only_the_named_slots(slots, dtype):
    rng = np.random.default_rng(0)
    pages = rng.normal(size=(6, 2, 4, 3)).astype(jnp.dtype(dtype))
    new = rng.normal(size=(5, 2, 3)).astype(np.float32)
    page, offset = (np.array(column, np.int32) for column in zip(*slots, strict=True))
    expected = pages.copy()
    for t in range(5):
        if page[t] < 6:
            expected[page[t], :, offset[t]] = new[t].astype(expected.dtype)
    out = write_pages(*map(jnp.asarray, (pages, new, page, offset)))
    assert out.dtype == pages.dtype and np.array_equal(np.asarray(out), expected)


def test_write_pages_drops_tokens_past_the_pool():
    pages, new = jnp.zeros((3, 1, 2, 4)), jnp.full((2, 1, 4), jnp.nan)
    out = write_pages(pages, new, jnp.array([3, 2**31 - 1]), jnp.array([0, 1]))
    assert not np.asarray(out).any()


def test_write_pages_is_in_place_under_donation():
    """The compiled write allocates nothing of the pool's size, for any T."""
    pages = jax.ShapeDtypeStruct((4096, 2, 16, 32), jnp.float32)
    pool_bytes = 4096 * 2 * 16 * 32 * 4
    for T in (1, 2, 16):
        new = jax.ShapeDtypeStruct((T, 2, 32), jnp.float32)
        ids = jax.ShapeDtypeStruct((T,), jnp.int32)
        program = jax.jit(write_pages, donate_argnums=0).lower(pages, new, ids, ids).compile()
        memory: Any = program.memory_analysis()
        assert memory.alias_size_in_bytes == pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 100


QUANTIZED = {name: jnp.zeros((6, 2, 4, 16), jnp.int8) for name in ("k_pages", "v_pages")}


def _arrays(**changes) -> dict[str, Any]:
    """Return well-formed arguments of the shape check, some of them replaced."""
    shapes = {
        "q": (8, 4, 16),
        "k_pages": (6, 2, 4, 16),
        "v_pages": (6, 2, 4, 16),
        "q_start": (4,),
        "kv_len": (3,),
        "page_table": (3, 5),
    }
    arrays = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    for name, change in changes.items():
        arrays[name] = jnp.zeros(change) if isinstance(change, tuple) else change
    names = {"k": "k_pages", "v": "v_pages", "k_scales": "k_scales", "v_scales": "v_scales"}
    pages = {field: arrays.pop(name) for field, name in names.items() if name in arrays}
    rows = {name: arrays.pop(name) for name in ("q_start", "kv_len", "page_table")}
    return arrays | {"rows": RaggedRows(**rows), "pages": KVPages(**pages)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"v_pages": (6, 2, 4, 8)},
            r"k, float32\(6, 2, 4, 16\), and of v, float32\(6, 2, 4, 8\), differ",
        ),
        ({"v_pages": jnp.zeros((6, 2, 4, 16), jnp.int8)}, r"k, float32\(.*\), and of v, int8\("),
        ({"k_scales": (6, 2, 4)}, "pages of float32 have no use for k_scales"),
        (QUANTIZED, "pages of int8 need k_scales"),
        ({**QUANTIZED, "k_scales": (6, 2, 4)}, "pages of int8 need v_scales"),
        (
            {**QUANTIZED, "k_scales": (6, 2, 4), "v_scales": (6, 2, 5)},
            r"v_scales has shape \(6, 2, 5\); of these pages it must be \(6, 2, 4\)",
        ),
        ({"q": (8, 4, 32)}, "head dim of q is 32, of the pages 16"),
        ({"q": (8, 3, 16)}, "3 query heads are no multiple of 2 KV heads"),
        ({"q_start": (3,)}, "q_start has 2, kv_len 3, page_table 3"),
        ({"kv_len": (4,)}, "q_start has 3, kv_len 4, page_table 3"),
        ({"page_table": (2, 5)}, "q_start has 3, kv_len 3, page_table 2"),
        ({"q_start": (1,), "kv_len": (0,), "page_table": (0, 5)}, "there are 0 rows"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    api.check_call(**_arrays(), variant=AttentionVariant(1.0))
    with pytest.raises(ValueError, match=message):
        api.check_call(**_arrays(**changes), variant=AttentionVariant(1.0))


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"window": -3}, "window is -3"),
        ({"soft_cap": 0.0}, r"soft_cap is 0\.0; it must be above 0"),
        ({"soft_cap": -1.0}, r"soft_cap is -1\.0"),
        ({"soft_cap": float("nan")}, "soft_cap is nan"),
        ({"soft_cap": float("inf")}, "soft_cap is inf; it must be above 0 and finite"),
    ],
)
def test_variants_out_of_range_are_refused(variant, message):
    with pytest.raises(ValueError, match=message):
        run(make_case([(1, 1)]), None, scale=1.0, **variant)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_per_head_arrays_must_have_one_number_a_head(name):
    options: dict[str, Any] = {name: jnp.zeros(2)}
    variant = AttentionVariant(1.0, **options)
    with pytest.raises(ValueError, match=rf"{name} has shape \(2,\); it must be \(4,\)"):
        variant.check(4)


def test_backend_can_be_forced():
    case = make_case(ROWS)
    with pytest.raises(ValueError, match="paged_attention has no backend 'cuda'"):
        run(case, "cuda", scale=1.0)
    assert np.array_equal(run(case, "xla", scale=1.0), run(case, None, scale=1.0))


def test_declining_backend_is_named(monkeypatch):
    def declines(*args, **kwargs):
        raise NotImplementedError("head dim 16 is too odd")

    monkeypatch.setitem(BACKENDS, "xla", declines)
    with pytest.raises(NoBackendError, match="xla: head dim 16 is too odd"):
        paged_attention(*make_case(ROWS).arrays(), AttentionVariant(1.0))
