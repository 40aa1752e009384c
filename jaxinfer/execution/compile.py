"""Ahead-of-time compilation, with XLA options for the platform that is traced for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
from absl import logging

from jaxinfer.kernels.dispatch import platform

NUM_COMPILE_THREADS = 2

# By default XLA splits a decode step's products on a GPU along the contracted axis. Each sum of the
# parts is one more kernel, which is fused with neither the addition to the residual stream nor the
# norm behind it. A Llama-3-8B layer compiled for an H100 has 11 launches so, and 8 with this option
# (jax 0.10.2).
COMPILER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {"xla_gpu_experimental_force_split_k": 1}
}
_nothing = jax.jit(lambda: 0)  # compiled to find out which options XLA knows


def compiler_options() -> dict[str, Any]:
    """Return the options for `lower().compile(compiler_options=...)` on the platform traced for.

    An option that the installed XLA does not know is left out and logged: it changes speed alone.
    """
    options = COMPILER_OPTIONS.get(platform(), {})
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.lru_cache
def _is_known(name: str, value: Any) -> bool:
    try:
        _nothing.lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        logging.warning("this XLA has no option %s: a step takes more launches", name)
        return False
    return True


def compile_program(lowered: Any) -> Any:
    return lowered.compile(compiler_options=compiler_options())


def compile_programs(
    lower: Mapping[Any, Callable[[], Any]], on_compiled: Callable[[Any, Any], None]
) -> None:
    """Lower and compile every program; `on_compiled` gets each one's key and compiled program.

    Tracing holds Python's lock and compiling does not: one thread traces while two compile.
    """
    options = compiler_options()
    compiled = lambda lowered: lowered.compile(compiler_options=options)
    with ThreadPoolExecutor(NUM_COMPILE_THREADS) as pool:
        try:
            futures = {pool.submit(compiled, trace()): key for key, trace in lower.items()}
            for future in as_completed(futures):
                on_compiled(futures[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
