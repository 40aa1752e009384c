"""Call a kernel's case (`kernel_cases`) for a compiler, on a device, or with a recorder."""

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
    """The tables of backends, `...BACKENDS`, in the module of the case's function.

    Raises `ValueError` where the module has none.
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
    """The case's backends for a platform, in the case's order."""
    return [name for name in case.backends if BACKEND_PLATFORMS.get(name, platform) == platform]


@contextlib.contextmanager
def backend_with(case: Case, backend: str, **keywords: Any) -> Iterator[None]:
    """Make the case's function pass more keywords to `backend` within the context, such as
    `launch`, `tiling` and `interpret`. Earlier traces of jit are not affected."""
    with contextlib.ExitStack() as stack:
        having = [table for table in tables(case) if backend in table]
        if not having:
            raise ValueError(f"{case.function.__module__} has no backend {backend!r}")
        for table in having:
            changed = {backend: partial(table[backend], **keywords)}
            stack.enter_context(mock.patch.dict(table, changed))
        yield


def is_dynamic(value: Any) -> bool:
    """Whether an option consists of arrays, or of their specs, alone."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into arrays, which a program takes as inputs, and static ones."""
    dynamic = {name: value for name, value in options.items() if is_dynamic(value)}
    return dynamic, {name: value for name, value in options.items() if name not in dynamic}


def call_of(case: Case, backend: str) -> Callable[[Any, Any], Any]:
    """Return `f(arguments, arrays)`, which calls the case by that backend; `arrays` are the options
    that are arrays."""
    _, static = split_options(case.options)

    def call(arguments, arrays):
        return case.function(*arguments, **arrays, **static, backend=backend)

    return call


def record_launches(case: Case, backend: str = "gpu", **keywords: Any) -> list[TritonLaunch]:
    """Return the Triton kernels that a call launches. The caller selects a GPU for the trace.

    Raises `NotImplementedError` where the backend declines.
    """
    recorder = Recorder()
    arrays, _ = split_options(case.options)
    with backend_with(case, backend, launch=recorder, **keywords):
        jax.eval_shape(call_of(case, backend), case.arguments, arrays)
    return recorder.launches


def backend_module(operator: str, backend: str) -> Any:
    """Import the module of an operator's backend."""
    return importlib.import_module(f"jaxinfer.kernels.{operator}.{backend}")
