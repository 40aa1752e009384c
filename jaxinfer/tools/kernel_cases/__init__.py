"""The kernels' cases: calls of each operator at the shapes of real models, one module an operator.

The compile gate compiles them, the device check runs and times them, the tuner searches tilings for
them. A module has `cases() -> dict[str, Case]` and may have `tiny_cases()`, the same in sizes that
an interpreter runs in a second or two: rehearsals on a CPU use those. `kernel_calls.py` has the
means to call a case.
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
    """A call of an operator, abstract, with the means to make it real and to judge it.

    `arguments` is a tuple of pytrees of `jax.ShapeDtypeStruct`; arrays among `options` are abstract
    too. `make(rng)` returns `(arguments, options)` with NumPy arrays in their places, valid ones
    (a page table that points into the pool, say). The call is `function(*arguments, **options)`.
    """

    function: Callable[..., Any]  # the front door
    arguments: Arguments
    options: Mapping[str, Any]
    make: Callable[[np.random.Generator], tuple[Arguments, dict[str, Any]]]
    bytes_moved: int  # that a perfect kernel reads and writes once
    flops: int  # of its products, 2 a multiply-add
    tolerance: float  # on ||out - ref|| / ||ref|| against the reference
    backends: tuple[str, ...] = ("tpu", "gpu")
    targets: tuple[str, ...] = (*TPU, *GPU)  # of the compile gate, where the backend is for them
    # The same job by PyTorch's best, for a comparison on a GPU: called as the front door is,
    # `peer(*arguments, **options)`, with what `make` returned as CUDA tensors; returns a function
    # of nothing, to be timed. None: PyTorch has no such thing.
    peer: Callable[..., Callable[[], Any]] | None = None
    is_tunable: bool = True  # its backends' `candidates` and `tiling_key` are for this front door
    is_headline: bool = False  # the device check runs these before the others


Cases = dict[str, Case]


def operators() -> list[str]:
    """The operators that have a module of cases here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(operator: str, *, tiny: bool = False) -> Cases:
    """An operator's cases by name, or its tiny ones (none, where the module has none).

    Raises `ValueError`, which names the module, for one that cannot be imported, whose `cases` fail
    or that has none.
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
    """Cases of the operators that have sound modules, and why the others have none."""
    found: dict[str, Cases] = {}
    broken: dict[str, str] = {}
    for name in names:
        try:
            found[name] = load(name)
        except ValueError as error:
            broken[name] = str(error)
    return found, broken


def with_headlines(cases: Cases, names: tuple[str, ...]) -> Cases:
    """The same cases in the same order, those of `names` marked as headlines.

    Raises `ValueError` for a name that is not there.
    """
    if unknown := set(names) - set(cases):
        raise ValueError(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    return {
        name: dataclasses.replace(case, is_headline=name in names) for name, case in cases.items()
    }


def random_array(
    rng: np.random.Generator, spec: jax.ShapeDtypeStruct, scale: float = 1.0
) -> np.ndarray:
    """Normal numbers of a spec's shape and type; of int8, whole numbers over its range.

    A large array repeats a run of them whose length is prime, so that no two rows are alike: a
    pool of a billion numbers takes a second, not a minute.
    """
    size = math.prod(spec.shape)
    count = min(size, LONGEST_RUN)
    if np.issubdtype(spec.dtype, np.integer):
        run = rng.integers(-127, 128, count).astype(spec.dtype)
    else:
        run = (scale * rng.standard_normal(count, np.float32)).astype(spec.dtype)
    return np.resize(run, spec.shape)
