"""The kernels' cases: calls of each operator at the shapes of real models, one module an operator.

The compile gate compiles them, the device check runs and times them, and the tuner searches tilings
for them. A module has `cases() -> dict[str, Case]` and may have `tiny_cases()`, in sizes that an
interpreter runs in a second or two, for rehearsals on a CPU. `kernel_calls.py` calls a case.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

TPU = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPU = ("a100", "h100")

Arguments = tuple[Any, ...]

LONGEST_RUN = 4_194_301  # a prime


@dataclasses.dataclass(frozen=True)
class Case:
    """An abstract call of an operator, with functions that make its arrays and judge its result.

    `arguments` is a tuple of pytrees of `jax.ShapeDtypeStruct`; arrays among `options` are abstract
    too. `make(rng)` returns `(arguments, options)` with NumPy arrays in their places, valid ones
    (a page table that points into the pool, say). The call is `function(*arguments, **options)`.
    """

    function: Callable[..., Any]  # the operator's public function
    arguments: Arguments
    options: Mapping[str, Any]
    make: Callable[[np.random.Generator], tuple[Arguments, dict[str, Any]]]
    bytes_moved: int  # read and written by a perfect kernel
    flops: int  # of matrix products, 2 a multiply-add
    tolerance: float  # on ||out - ref|| / ||ref|| against the reference
    backends: tuple[str, ...] = ("tpu", "gpu")
    targets: tuple[str, ...] = (*TPU, *GPU)  # chips of the compile gate that run the case
    # The same operation in PyTorch, for comparison on a GPU: called as the public function is,
    # `peer(*arguments, **options)`, with what `make` returned as CUDA tensors; returns a function
    # of nothing, to be timed. None: PyTorch has no such thing.
    peer: Callable[..., Callable[[], Any]] | None = None
    is_tunable: bool = True  # its backends' `candidates` and `tiling_key` fit this function
    is_headline: bool = False  # the device check runs headlines first


Cases = dict[str, Case]


def operators() -> list[str]:
    """The operators that have a module of cases."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(operator: str, *, tiny: bool = False) -> Cases:
    """Load an operator's cases by name, or its tiny ones, if any.

    Raises `ValueError`, which names the module, where it cannot be imported, where its `cases`
    fail, or where there are none.
    """
    try:
        module = importlib.import_module(f"{__name__}.{operator}")
        if tiny and not hasattr(module, "tiny_cases"):
            return {}
        cases = module.tiny_cases() if tiny else module.cases()
        wrong = [name for name, case in cases.items() if not isinstance(case, Case)]
        if wrong or not cases:
            raise ValueError(f"{', '.join(wrong)} is no Case" if wrong else "there are no cases")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"jaxinfer/tools/kernel_cases/{operator}.py is broken: {reason}"
        ) from error
    return cases


def load_all(names: list[str]) -> tuple[dict[str, Cases], dict[str, str]]:
    """Load the cases of several operators; also return why modules are broken, by operator."""
    found: dict[str, Cases] = {}
    broken: dict[str, str] = {}
    for name in names:
        try:
            found[name] = load(name)
        except ValueError as error:
            broken[name] = str(error)
    return found, broken


def with_headlines(cases: Cases, names: tuple[str, ...]) -> Cases:
    """Mark the cases of `names` as headlines.

    Raises `ValueError` for an unknown name.
    """
    if unknown := set(names) - set(cases):
        raise ValueError(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    return {
        name: dataclasses.replace(case, is_headline=name in names) for name, case in cases.items()
    }


def random_array(
    rng: np.random.Generator, spec: jax.ShapeDtypeStruct, scale: float = 1.0
) -> np.ndarray:
    """Draw normal numbers of a spec's shape and type, or integers over the range of int8.

    A large array repeats a run of prime length, so that no two rows are equal: a pool of a billion
    numbers then takes a second instead of a minute.
    """
    size = math.prod(spec.shape)
    count = min(size, LONGEST_RUN)
    if np.issubdtype(spec.dtype, np.integer):
        run = rng.integers(-127, 128, count).astype(spec.dtype)
    else:
        run = (scale * rng.standard_normal(count, np.float32)).astype(spec.dtype)
    return np.resize(run, spec.shape)
