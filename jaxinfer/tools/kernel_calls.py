"""Calling a kernel's case (`kernel_cases`): for a compiler, for a device, for a recorder."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import jax

from jaxinfer.kernels.triton_launch import Recorder, TritonLaunch
from jaxinfer.tools.compile_gate.matrix import BACKEND_PLATFORMS
from jaxinfer.tools.kernel_cases import Case


def tables(case: Case) -> list[dict[str, Callable[..., Any]]]:
    """The tables of backends that the case's front door chooses from: `...BACKENDS` of its module.

    Raises `ValueError` where there is none.
    """
    function = inspect.unwrap(case.function)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    found = {
        id(value): value
        for name, value in vars(sys.modules[function.__module__]).items()
        if name.endswith("BACKENDS") and isinstance(value, dict)
    }
    if not found:
        raise ValueError(f"{function.__module__} has no table named BACKENDS")
    return list(found.values())


def backend_names(case: Case, platform: str) -> list[str]:
    """Those of the case's backends that are for a platform, in the case's order."""
    return [name for name in case.backends if BACKEND_PLATFORMS.get(name, platform) == platform]


@contextlib.contextmanager
def backend_with(case: Case, backend: str, **keywords: Any) -> Iterator[None]:
    """While it lasts, the case's front door calls `backend` with these keywords besides: `launch`,
    `tiling`, `interpret`. Traces that jit made before are not affected."""
    with contextlib.ExitStack() as stack:
        has_it = [table for table in tables(case) if backend in table]
        if not has_it:
            raise ValueError(f"{case.function.__module__} has no backend {backend!r}")
        for table in has_it:
            changed = {backend: partial(table[backend], **keywords)}
            stack.enter_context(mock.patch.dict(table, changed))
        yield


def is_dynamic(value: Any) -> bool:
    """Whether an option holds arrays (or their specs) and nothing else."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that are arrays, which a program takes, and those that it is compiled for."""
    dynamic = {name: value for name, value in options.items() if is_dynamic(value)}
    return dynamic, {name: value for name, value in options.items() if name not in dynamic}


def call_of(case: Case, backend: str) -> Callable[[Any, Any], Any]:
    """`f(arguments, arrays)`: the case by that backend, `arrays` being its options of that kind."""
    _, static = split_options(case.options)

    def call(arguments, arrays):
        return case.function(*arguments, **arrays, **static, backend=backend)

    return call


def record_launches(case: Case, backend: str = "gpu", **keywords: Any) -> list[TritonLaunch]:
    """The Triton kernels that a call launches; trace it for a GPU, by `dispatch`'s means.

    Raises `NotImplementedError` where the backend declines.
    """
    recorder = Recorder()
    arrays, _ = split_options(case.options)
    with backend_with(case, backend, launch=recorder, **keywords):
        jax.eval_shape(call_of(case, backend), case.arguments, arrays)
    return recorder.launches


def backend_module(operator: str, backend: str) -> Any:
    """The module of an operator's backend."""
    return importlib.import_module(f"jaxinfer.kernels.{operator}.{backend}")
