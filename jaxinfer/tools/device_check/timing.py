"""Measure the device time of a call in JAX, which has no device events.

N calls run in sequence in one program (`lax.fori_loop`), without launches from the host between
them. Each depends on the previous one, so that none is optimized away: outputs with an argument's
shape and type replace it (queries become the attention's result, pages are updated in place); where
no output matches, the first number of the output replaces the first number of the smallest
floating-point argument. The time of the same program with two calls, which includes the launch, the
copies into the loop's memory and the read-back, is subtracted, and the difference is divided by the
difference in calls.

Inputs that fit a GPU's L2 cache are read from it by all calls but the first, like the inputs of an
operator in a model that the previous operator has just written. Weights and caches do not fit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Call = Callable[[Any, Any], Any]  # takes arguments, and options that are arrays
TARGET_SECONDS = 0.03  # for a program of N calls: 300 times a launch from the host
MAX_CALLS = 2000
REPEATS = 5
FEWEST = 2  # the smallest number of calls that is still a loop


def pairs(arguments: Any, outputs: Any) -> list[tuple[int, int]]:
    """Pair leaves of `arguments` with leaves of `outputs` that can replace them: activations and
    pages, but no integers such as lengths and tables."""
    found, taken = [], set()
    given = jax.tree.leaves(arguments)
    for j, out in enumerate(jax.tree.leaves(outputs)):
        for i, x in enumerate(given):
            is_same = x.shape == out.shape and x.dtype == out.dtype
            if i not in taken and is_same and (x.dtype.itemsize == 1 or _is_floating(x)):
                found.append((i, j))
                taken.add(i)
                break
    return found


def count_for(floor_seconds: float) -> int:
    """The number of calls in a program, from a lower bound on the time of one."""
    return max(3, min(MAX_CALLS, math.ceil(TARGET_SECONDS / max(floor_seconds, 1e-5))))


def device_seconds(
    call: Call,
    arguments: Any,
    arrays: Any,
    count: int,
    *,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The median seconds of one call; the module's docstring describes the method. With `repeats` 0
    the first run counts.

    Compiles two programs. Raises what the call raises.
    """

    def median(num_calls: int) -> float:
        program = jax.jit(_program(call, arguments, arrays, num_calls))
        times = []
        for _ in range(1 + repeats):
            started = clock()
            jax.block_until_ready(program(arguments, arrays))
            times.append(clock() - started)
        return statistics.median(times[1:] or times)

    few, many = median(FEWEST), median(FEWEST + count)
    return max(many - few, 0.0) / count


def _program(call: Call, arguments: Any, arrays: Any, count: int) -> Call:
    """A program of `count` calls in sequence."""
    outputs = jax.eval_shape(call, arguments, arrays)
    fed = pairs(arguments, outputs)
    changed = [i for i, _ in fed] or [_smallest(jax.tree.leaves(arguments))]
    treedef = jax.tree.structure(arguments)

    def run(arguments, arrays):
        leaves = jax.tree.leaves(arguments)

        def one_call(_, changing: Sequence[jax.Array]):
            mixed = list(leaves)
            for i, x in zip(changed, changing, strict=True):
                mixed[i] = x
            out = jax.tree.leaves(call(jax.tree.unflatten(treedef, mixed), arrays))
            if fed:
                return tuple(out[j] for _, j in fed)
            return (_with_first(changing[0], _first(out[0])),)

        start = tuple(leaves[i] for i in changed)
        return [_first(x) for x in lax.fori_loop(0, count, one_call, start)]

    return run


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _smallest(leaves: Sequence[Any]) -> int:
    floating = [i for i, x in enumerate(leaves) if _is_floating(x)]
    if not floating:
        raise ValueError("no argument is floating-point: nothing ties one call to the next")
    return min(floating, key=lambda i: math.prod(leaves[i].shape))


def _first(x: jax.Array) -> jax.Array:
    return x[(0,) * x.ndim]


def _with_first(x: jax.Array, value: jax.Array) -> jax.Array:
    return x.at[(0,) * x.ndim].set(value.astype(x.dtype))
