"""Block masks, tiles that are not visited, merging, refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.flash_attention import (
    BACKENDS,
    BlockMask,
    ColumnIntervals,
    block_mask,
    flash_attention,
    merge,
)
from jaxinfer.kernels.flash_attention.blocks import fit, steps_of, tile_kinds, walk_of
from jaxinfer.kernels.flash_attention.rule import FlashArrays, FlashRule
from tests.support.flash_cases import (
    Case,
    Shape,
    assert_close,
    check,
    grouped,
    make_case,
    name_of,
    oracle,
    run,
)
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

_marks = {"gpu": [needs_triton]}
every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=_marks.get(name, [])) for name in BACKENDS]
)

QUERIES, KEYS = 48, 384
# The TPU's tiles are 16 x 128 in tests, the others' 16 x 16; a mask's blocks are multiples of both.
BLOCKS = {"q_block": 16, "k_block": 128}
SHAPE = Shape(2, QUERIES, KEYS, 4, 2, 16)


def middle_hidden(row, head, q, k):
    """No query sees keys 128 .. 255, all see 256 on, and the first block is cut."""
    return (k >= 256) | (k < 100)


def by_row_and_head(row, head, q, k):
    """Row 1 and head 3 see only their last block, the others the first two."""
    return ((k >= 256) & (row + head // 3 > 0)) | ((k < 256) & (row + head // 3 == 0))


def poisoned(case: Case, mask: BlockMask) -> Case:
    """Set keys and values of blocks that are empty for all heads of a KV head to NaN."""
    read = np.broadcast_to(np.asarray(mask.kind) > 0, (2, 4, *mask.kind.shape[2:])).any(axis=2)
    read = read.reshape(2, 2, 2, -1).any(axis=2)  # [R, K, TK]
    read = np.repeat(read, mask.k_block, axis=2)[:, :, :KEYS].swapaxes(1, 2)[..., None]
    poison = lambda x: np.where(read, x, np.nan).astype(x.dtype)
    return Case(case.q, poison(case.k), poison(case.v))


@every_backend
@pytest.mark.parametrize("causal", [False, True])
def test_empty_blocks_are_not_read(backend, causal):
    q_offset = 220 if causal else 0
    mask = block_mask(middle_hidden, QUERIES, KEYS, q_offset=q_offset, **BLOCKS)
    assert np.asarray(mask.kind)[0, 0].tolist() == [[1, 0, 2]] * 3
    clean = make_case(SHAPE)
    case = poisoned(clean, mask)
    assert np.isnan(case.k).mean() == np.isnan(case.v).mean() == 1 / 3
    variant = {"scale": 0.25, "mask_mod": middle_hidden, "causal": causal, "q_offset": q_offset}
    out, lse = run(case, backend, block_mask=mask, **variant)
    ref, ref_lse = oracle(clean, **variant)
    assert_close(out, ref, 1e-5)
    assert np.allclose(lse, ref_lse, rtol=1e-5, atol=1e-5)


@every_backend
def test_masks_may_differ_by_row_and_head(backend):
    mask = block_mask(by_row_and_head, QUERIES, KEYS, rows=2, heads=4, **BLOCKS)
    assert set(np.unique(np.asarray(mask.kind)).tolist()) == {0, 2}
    clean = make_case(SHAPE)
    case = poisoned(clean, mask)
    assert np.isnan(case.v).any()
    variant = {"scale": 0.25, "mask_mod": by_row_and_head}
    out, _ = run(case, backend, block_mask=mask, **variant)
    assert_close(out, oracle(clean, **variant)[0], 1e-5)


@every_backend
def test_length_within_a_masked_block_matches_the_formula(backend):
    mask = block_mask(middle_hidden, QUERIES, KEYS, **BLOCKS)
    case = make_case(SHAPE, kv_len=[300, 100])
    variant = {"scale": 0.25, "mask_mod": middle_hidden}
    out, _ = run(case, backend, block_mask=mask, **variant)
    assert_close(out, oracle(case, **variant)[0], 1e-5)


def test_block_mask_ignores_padding_positions():
    def mod(row, head, q, k):
        return (q < 19) & (k < 33)

    mask = block_mask(mod, 19, 33, q_block=16, k_block=16)
    assert np.asarray(mask.kind)[0, 0].tolist() == [[2, 2, 2]] * 2
    later = block_mask(mod, 19, 33, q_block=16, k_block=16, q_offset=1)
    assert np.asarray(later.kind)[0, 0].tolist() == [[2, 2, 2], [1, 1, 1]]
    many = block_mask(lambda r, h, q, k: q >= 16 * (r + h), 32, 16, rows=2, heads=2, q_block=16)
    assert np.asarray(many.kind)[..., 0].tolist() == [[[2, 2], [0, 2]], [[0, 2], [0, 0]]]


TILES = [
    ({"causal": True}, {}, [[1, 0, 0], [2, 1, 0], [2, 2, 1]]),
    ({"causal": True, "window": 5}, {}, [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
    ({"window": 2}, {}, [[1, 1, 0], [1, 1, 1], [0, 1, 1]]),
    ({}, {"kv_len": np.array([5])}, [[2, 1, 0]] * 3),
    ({"causal": True}, {"q_offset": -4}, [[0, 0, 0], [1, 0, 0], [2, 1, 0]]),
    ({"mask_mod": lambda *at: True}, {}, [[1, 1, 1]] * 3),
    (
        {},
        {"hidden": (np.array([[[4] * 12]]), np.array([[[8] * 12]]))},
        [[2, 2, 2], [0, 0, 0], [2, 2, 2]],
    ),
    (
        {},
        {"hidden": (np.array([[[5] * 4 + [9] * 8]]), np.array([[[99] * 4 + [0] * 8]]))},
        [[2, 2, 2], [1, 2, 2], [0, 2, 2]],
    ),
]


@pytest.mark.parametrize(("rule", "given", "expected"), TILES, ids=name_of)
@pytest.mark.parametrize("is_traced", [False, True])
def test_tile_kinds_agree_when_traced_and_static(rule, given, expected, is_traced):
    if "hidden" in given:
        given = {"hidden": ColumnIntervals(*(jnp.asarray(x) for x in given["hidden"]))}
    find = lambda arrays: tile_kinds(FlashRule(1.0, **rule), FlashArrays(**arrays), 12, 12, (4, 4))
    kinds = jax.jit(find)(given) if is_traced else find(given)
    assert isinstance(kinds, np.ndarray) != is_traced
    assert kinds[0, 0].tolist() == expected


def test_tile_lists_put_whole_tiles_first():
    kinds = np.array([[[[1, 0, 2, 2], [0, 0, 0, 0], [0, 1, 0, 0]]]])
    walk = walk_of(kinds)
    assert walk.num_whole[0, 0].tolist() == [2, 0, 0]
    assert walk.num_tiles[0, 0].tolist() == [3, 0, 1]
    assert walk.tile[0, 0, 0, :3].tolist() == [2, 3, 0] and walk.tile[0, 0, 2, 0] == 1
    for found in (steps_of(kinds), jax.jit(steps_of)(kinds)):
        steps, count = (np.asarray(x)[0, 0] for x in found)
        read = [(s >> 4, s >> 2 & 3, bool(s & 2), bool(s & 1)) for s in steps[:count].tolist()]
        assert read == [
            (0, 1, True, False), (2, 2, False, False), (3, 2, False, True),
            (4, 0, True, True),
            (9, 1, True, True),
        ]  # fmt: skip
    assert [fit(16, None), fit(16, 24), fit(100, 24), fit(7, 12)] == [16, 12, 24, 6]


@every_backend
def test_results_over_disjoint_keys_merge(backend):
    """As in a ring, each half of the keys has its own offset, and some queries see none of a
    half."""
    case = make_case(Shape(1, 20, 64, 2, 1, 16))
    halves = [Case(case.q, case.k[:, i : i + 32], case.v[:, i : i + 32]) for i in (0, 32)]
    at = lambda offset: {"scale": 0.25, "causal": True, "q_offset": offset}
    found = [run(half, backend, **at(20 - i)) for half, i in zip(halves, (0, 32), strict=True)]
    out, lse = merge(*(jnp.asarray(x) for pair in found for x in pair))
    ref, ref_lse = oracle(case, **at(20))
    assert np.isneginf(found[1][1]).any()
    assert_close(np.asarray(out), ref, 1e-5)
    assert np.allclose(np.asarray(lse), ref_lse, rtol=1e-5, atol=1e-5)


def test_merge_of_empty_results_is_empty():
    out, lse = jnp.zeros((1, 2, 1, 4), jnp.bfloat16), jnp.full((1, 2, 1), -jnp.inf)
    merged, merged_lse = merge(out, lse, out, lse)
    assert merged.dtype == jnp.bfloat16 and not np.asarray(merged).any()
    assert np.isneginf(np.asarray(merged_lse)).all()


def test_mods_may_close_over_arrays_outside_kernels():
    documents = jnp.asarray(np.repeat([0, 1, 2], [7, 20, 13]))

    def same(row, head, q, k):
        return documents[q] == documents[k]

    for backend in ("xla", "reference"):
        check(make_case(), backend, mask_mod=same)
    for backend in ("tpu", *(() if needs_triton.args[0] else ("gpu",))):
        with pytest.raises(NoBackendError, match="mask_mod closes over arrays"):
            run(make_case(), backend, mask_mod=same, scale=1.0)


def _arguments(**changes: Any) -> tuple[list[jax.Array], dict[str, Any]]:
    shapes = {"q": (2, 8, 4, 16), "k": (2, 6, 2, 16), "v": (2, 6, 2, 16)}
    arrays = [jnp.zeros(changes.pop(name, shape)) for name, shape in shapes.items()]
    return arrays, {"scale": 1.0, **changes}


def every(row, head, q, k):
    return q == q


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"v": (2, 6, 2, 8)}, r"k \(2, 6, 2, 16\) and v \(2, 6, 2, 8\) differ"),
    ({"q": (1, 8, 4, 16)}, "differ in rows or head dim"),
    ({"q": (2, 8, 3, 16)}, "3 query heads are no multiple of 2 KV heads"),
    ({"q": (2, 0, 4, 16)}, "is empty"),
    ({"kv_len": jnp.zeros(3, jnp.int32)}, r"kv_len has shape \(3,\); it must be \(2,\)"),
    ({"q_offset": jnp.zeros(3, jnp.int32)}, r"q_offset has shape \(3,\)"),
    ({"sinks": jnp.zeros(3)}, r"sinks has shape \(3,\); it must be \(4,\)"),
    ({"alibi_slopes": jnp.zeros(2)}, "alibi_slopes has shape"),
    ({"window": 0}, "window is 0; it must be at least 1"),
    ({"soft_cap": 0.0}, "soft_cap is 0.0"),
    ({"block_mask": block_mask(every, 8, 6)}, "without its mask_mod"),
    (
        {"mask_mod": every, "block_mask": block_mask(every, 8, 6), "q_offset": 3},
        "block_mask is for q_offset 0, the call has 3",
    ),
    (
        {"mask_mod": every, "block_mask": block_mask(every, 9, 300, q_block=8)},
        "block_mask is for 1 rows, 1 heads, 2 x 3 blocks; the call has 2",
    ),
    (
        {"hidden": ColumnIntervals(*[jnp.zeros((2, 1, 5), jnp.int32)] * 2)},
        r"hidden has shape \(2, 1, 5\); it must be \(2, C, 6\)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m[:20] for _, m in REFUSED])
def test_arguments_that_do_not_fit_are_refused(monkeypatch, changes, message):
    """The operator's own checks refuse them; in tests, jaxtyping's come before them."""
    arrays, options = _arguments(**changes)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        variant, mask, _ = grouped(options)
        flash_attention(*arrays, variant=variant, mask=mask)


def test_block_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="blocks are 0 x 128"):
        block_mask(every, 8, 8, q_block=0)
