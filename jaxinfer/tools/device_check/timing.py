"""Device time of a call, from JAX, which has no device events.

N calls run one behind another in one program (`lax.fori_loop`), so that no launch from the host
lies between them, and each depends on the one before, so that none is left out: outputs with an
argument's shape and type take its place (queries become the attention's result, pages are updated
in place); where there is none, the first number of the output is written over the first number of
the smallest floating-point argument. The time of the same program with two calls is subtracted (it
holds the launch, the copies into the loop's memory and the read-back), and the rest divided by the
calls that it lacks.

What fits a GPU's L2 is read from it by all calls but the first, as an operator's inputs are in a
model whose last operator has just written them. Weights and caches of a model do not fit.
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

Call = Callable[[Any, Any], Any]  # of arguments and of options that are arrays
TARGET_SECONDS = 0.03  # of a program of N calls: 300 times a launch from the host
MAX_CALLS = 2000
REPEATS = 5
FEWEST = 2  # calls that still make a loop


def pairs(arguments: Any, outputs: Any) -> list[tuple[int, int]]:
    """Leaves of `arguments` and the leaves of `outputs` that can take their places: activations and
    pages, not whole numbers such as lengths and tables."""
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
    """Calls in a program, from the least time that one can take."""
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
    """Median seconds of one call; see the module's text. With `repeats` 0 the first run counts.

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
    """`count` calls in a row."""
    outputs = jax.eval_shape(call, arguments, arrays)
    fed = pairs(arguments, outputs)
    changed = [i for i, _ in fed] or [_smallest(jax.tree.leaves(arguments))]
    treedef = jax.tree.structure(arguments)

    def run(arguments, arrays):
        leaves = jax.tree.leaves(arguments)

        def turn(_, changing: Sequence[jax.Array]):
            mixed = list(leaves)
            for i, x in zip(changed, changing, strict=True):
                mixed[i] = x
            out = jax.tree.leaves(call(jax.tree.unflatten(treedef, mixed), arrays))
            if fed:
                return tuple(out[j] for _, j in fed)
            return (_with_first(changing[0], _first(out[0])),)

        start = tuple(leaves[i] for i in changed)
        return [_first(x) for x in lax.fori_loop(0, count, turn, start)]

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
