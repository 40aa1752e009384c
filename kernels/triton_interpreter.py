"""Patches for the faults of Triton 3.6's interpreter, applied while it runs a kernel."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np

# The interpreter has global state, and XLA may call back from several threads.
_LOCK = threading.Lock()

_FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn"}


@contextlib.contextmanager
def patched_interpreter() -> Iterator[None]:
    """Patch the interpreter for one thread at a time, so that

    * `range(n)` takes an n from memory (the interpreter calls `int` on an array of one number,
      which NumPy 2.4 refuses);
    * `tl.dot` multiplies bfloat16 numbers (not the 16-bit integers that hold them): they become
      float32 first, which loses nothing;
    * an integer becomes the bfloat16 of its value (not the one of its bits);
    * narrow floats are rounded to nearest even, as on a GPU (the interpreter truncates
      bfloat16, and loses the carry where a float8 is rounded up to a power of two).
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    with _LOCK:
        patch_tensor, dot, cast = (
            interpreter._patch_lang_tensor,
            builder.create_dot,
            builder.cast_impl,
        )

        def patched(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
            return dot(self, _widened(interpreter, a), _widened(interpreter, b), *rest)

        def cast_impl(self: Any, source: Any, target: Any) -> Any:
            narrow = interpreter.tl.bfloat16
            if target.scalar == narrow and not source.dtype.scalar.is_floating():
                source = cast(self, source, interpreter.tl.float32)
            return cast(self, source, target)

        with (
            mock.patch.object(interpreter, "_patch_lang_tensor", patched),
            mock.patch.object(interpreter, "_convert_float", _converted),
            mock.patch.object(builder, "create_dot", create_dot),
            mock.patch.object(builder, "cast_impl", cast_impl),
        ):
            yield


def _widened(interpreter: Any, handle: Any) -> Any:
    if handle.dtype != interpreter.tl.bfloat16 or handle.data.dtype != np.uint16:
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, interpreter.tl.float32)


def _converted(data: np.ndarray, source: Any, target: Any, _mode: Any) -> np.ndarray:
    """Convert between types; the interpreter keeps those that NumPy lacks as integers of their
    bits."""
    values = np.ascontiguousarray(data).view(jnp.dtype(_FLOATS[source.name]))
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(jnp.dtype(_FLOATS[target.name]))
    return converted.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)
