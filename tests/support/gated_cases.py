"""What the tests of gated and grouped products share: comparison, Triton's interpreter."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support.triton_bench import needs_triton

TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "float16": 2e-3,
}  # bounds on ||out - ref|| / ||ref||
EMULATOR = pltpu.InterpretParams()
IN_HASTE = {"xla_backend_optimization_level": 0}  # an emulator's code runs a few times

QUANTIZED: dict[str, dict[str, Any]] = {
    "int8, a scale a column": {"bits": 8},
    "int8, groups": {"bits": 8, "group_size": 32},
    "int8, zeros": {"bits": 8, "group_size": 64, "has_zeros": True},
    "int4, a scale a column": {"bits": 4},
    "int4, groups": {"bits": 4, "group_size": 32},
    "int4, zeros": {"bits": 4, "group_size": 64, "has_zeros": True},
}


def each_backend(backends: Any) -> pytest.MarkDecorator:
    """Parametrize over every backend; Triton's interpreter is used where it is installed."""
    marks = {"gpu": needs_triton}
    return pytest.mark.parametrize(
        "backend", [pytest.param(name, marks=marks.get(name, ())) for name in backends]
    )


def programs(function: Any, *static: str) -> tuple[Any, Any]:
    """Return the operator compiled with and without optimization."""
    well = jax.jit(function, static_argnames=(*static, "backend"))
    hastily = jax.jit(function, static_argnames=(*static, "backend"), compiler_options=IN_HASTE)
    return well, hastily


def assert_close(out: np.ndarray, ref: np.ndarray, tolerance: float) -> None:
    """Compare by the norm over all, and row by row, so that a wrong one cannot hide."""
    out = out.astype(np.float64)
    assert out.shape == ref.shape and np.isfinite(out).all()
    assert np.linalg.norm(out - ref) <= tolerance * np.linalg.norm(ref)
    of_row = lambda x: np.linalg.norm(x, axis=1)
    allowed = 5 * tolerance * (of_row(ref) + of_row(ref).mean())
    wrong = np.flatnonzero(of_row(out - ref) > allowed)
    assert not wrong.size, f"rows {wrong.tolist()} are off"
