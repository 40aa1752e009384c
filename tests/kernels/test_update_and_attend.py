"""What a layer calls: rotate, store, attend. Every form gives what the steps give one by one."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.kv_pages import KVPages, NewTokens, is_quantized, write
from jaxinfer.kernels.paged_attention import (
    AttentionVariant,
    RaggedRows,
    paged_attention,
    tpu,
    update,
)
from jaxinfer.kernels.paged_attention.update import update_and_attend
from jaxinfer.kernels.rotary import rotate

pytestmark = pytest.mark.conformance

EMULATED = {"tpu": partial(tpu.update_and_attend, interpret=pltpu.InterpretParams())}
STATIC = ("batch_invariant", "backend")
_unoptimized: Any = jax.jit(
    update_and_attend,
    static_argnames=STATIC,
    compiler_options={"xla_backend_optimization_level": 0},
)
P, K, B, H, N = 12, 2, 16, 16, 4
ROWS = [(1, 20), (7, 40), (0, 0), (20, 20)]  # queries, cached tokens with them


def step(dtype: str = "float32", num_shared: int = 0) -> tuple[Any, ...]:
    """Return the operator's arguments: rows whose new slots hold other numbers.

    The first `num_shared` tokens of row 1 are not to be stored: they are in their pages already.
    """
    rng = np.random.default_rng(0)
    q_len, kv_len = np.array(ROWS, np.int32).T
    q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    T = q_start[-1]
    table = rng.permutation(P).astype(np.int32).reshape(4, 3)
    row = np.repeat(np.arange(4), q_len)
    position = kv_len[row] - (q_start[row + 1] - np.arange(T))
    page, offset = table[row, position // B], (position % B).astype(np.int32)
    q, k, v = (jnp.asarray(rng.normal(size=(T, n, H)), jnp.float32) for n in (N, K, K))
    if is_quantized(dtype):
        stored = [jnp.asarray(rng.integers(-99, 99, (P, K, B, H)), dtype) for _ in range(2)]
        scales = [jnp.asarray(rng.random((P, K, B)), jnp.float32) for _ in range(2)]
    else:
        stored = [jnp.asarray(rng.normal(size=(P, K, B, H)), dtype) for _ in range(2)]
        scales = [None, None]
    pages = KVPages(*stored, *scales)
    angle = jnp.asarray(rng.normal(size=(T, H // 2)), jnp.float32)
    rotary = (jnp.cos(angle), jnp.sin(angle))
    shared = np.flatnonzero(row == 1)[:num_shared]
    there = np.full(T, P, np.int32)
    there[shared] = page[shared]
    at = (jnp.asarray(there), jnp.asarray(offset))
    pages = write(pages, NewTokens(rotate(k, *rotary), v, *at))
    page[shared] = P
    new = NewTokens(k, v, jnp.asarray(page), jnp.asarray(offset))
    rows = RaggedRows(*map(jnp.asarray, (q_start, kv_len, table)))
    return q, new, rows, pages, rotary


def in_parts(arguments, rotary, variant) -> Any:
    q, new, rows, pages = arguments
    q, new = rotate(q, *rotary), new._replace(k=rotate(new.k, *rotary))
    pages = write(pages, new)
    return paged_attention(q, rows, pages, variant, backend="reference"), pages


FORMS = [
    ("xla", "float32", {}),
    ("xla", "int8", {"window": 9}),
    ("xla", "float32", {"batch_invariant": True}),
    ("tpu", "float32", {}),
    ("tpu", "float32", {"window": 9, "soft_cap": 3.0}),
]


@pytest.mark.matrix(by="backend")
@pytest.mark.parametrize("num_shared", [0, 5])
@pytest.mark.parametrize(("backend", "dtype", "options"), FORMS)
def test_every_form_equals_its_parts(backend, dtype, options, num_shared):
    *arguments, rotary = step(dtype, num_shared)
    with mock.patch.dict(update.UPDATE_BACKENDS, EMULATED):
        of_score = {name: x for name, x in options.items() if name != "batch_invariant"}
        others = {name: x for name, x in options.items() if name not in of_score}
        variant = AttentionVariant(0.25, **of_score)
        out, pages = _unoptimized(*arguments, variant, rotary=rotary, backend=backend, **others)
    expected, stored = in_parts(arguments, rotary, variant)
    assert np.linalg.norm(out - expected) <= 1e-5 * np.linalg.norm(expected)
    kv_len, table = map(np.asarray, arguments[2][1:3])
    for got, want in zip(jax.tree.leaves(pages), jax.tree.leaves(stored), strict=True):
        for r, length in enumerate(kv_len):  # slots past a row's end may hold anything
            for p in range(length):
                at = (table[r, p // B], slice(None), p % B)
                np.testing.assert_allclose(got[at], want[at], rtol=1e-6, atol=1e-6)


def test_declined_update_kernel_is_replaced_by_two_steps():
    """Where the updating kernel declines, as for quantized pages, the backend takes both steps."""
    *arguments, rotary = step("int8")
    variant = AttentionVariant(0.25)
    declines = mock.Mock(side_effect=NotImplementedError("quantized"))
    with mock.patch.dict(update.UPDATE_BACKENDS, {"xla": declines}):
        out, _ = update_and_attend(*arguments, variant=variant, rotary=rotary, backend="xla")
    assert declines.called
    expected, _ = in_parts(arguments, rotary, variant)
    assert np.linalg.norm(out - expected) <= 1e-5 * np.linalg.norm(expected)


def test_forced_backend_that_cannot_write_is_an_error():
    """No other backend stores the tokens instead, whatever the platform prefers."""
    *arguments, rotary = step()
    declines = mock.Mock(side_effect=NotImplementedError("no store"))
    variant = AttentionVariant(0.25)
    with (
        mock.patch.dict(update.BACKENDS, {"gpu": declines}),
        pytest.raises(NoBackendError, match="no backend of rope_and_write took the call:\n  gpu"),
    ):
        update_and_attend(*arguments, variant=variant, rotary=rotary, backend="hopper")
    assert declines.called


@pytest.mark.parametrize("backend", ["xla", "tpu"])
@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window is 0"), ({"soft_cap": 0.0}, r"soft_cap is 0\.0")],
)
def test_options_out_of_range_are_refused_on_every_backend(backend, options, message):
    *arguments, rotary = step()
    with pytest.raises(ValueError, match=message):
        variant = AttentionVariant(1.0, **options)
        update_and_attend(*arguments, variant=variant, rotary=rotary, backend=backend)
