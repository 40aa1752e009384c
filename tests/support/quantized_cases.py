"""Cases of the product with quantized weights, and the reference results in float64."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.quantized_matmul import (
    ACTIVATION_BACKENDS,
    BACKENDS,
    QuantArray,
    quantize,
    quantized_matmul,
    tpu_activations,
)
from jaxinfer.kernels.quantized_matmul import gpu as gpu_backend
from jaxinfer.kernels.quantized_matmul import tpu as tpu_backend
from jaxinfer.kernels.triton_launch import interpret

TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "float16": 2e-3,
}  # bounds on ||out - ref|| / ||ref||
STATIC = ("activation_dtype", "out_dtype", "backend")

# Tests run the kernels in emulators, where unwritten memory is NaN.
EMULATED = {
    "tpu": partial(tpu_backend.quantized_matmul, interpret=pltpu.InterpretParams()),
    "gpu": partial(gpu_backend.quantized_matmul, launch=interpret),
}
EMULATED_ACTIVATIONS = {
    "tpu": partial(tpu_activations.quantize_activations, interpret=pltpu.InterpretParams()),
    "gpu": partial(gpu_backend.quantize_activations, launch=interpret),
}

WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int8 zeros": {"bits": 8, "has_zeros": True},
    "int4": {"bits": 4},
    "int4 zeros": {"bits": 4, "has_zeros": True},
    "float8": {"bits": 8, "is_float": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the operator, as NumPy arrays."""

    x: np.ndarray
    weight: QuantArray
    x_scale: np.ndarray | None = None


def make_case(
    weights: str,
    *,
    T: int = 5,
    D: int = 128,
    F: int = 136,
    group_size: int | None = None,
    x_dtype: str = "float32",
    scale_dtype: Any = np.float32,
    seed: int = 0,
) -> Case:
    """Return a case whose rows and columns differ in size by powers of ten, so that a wrong scale
    shows; an x of 8 bits comes with its own."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(D, F)) * 4.0 ** rng.integers(-1, 2, F)
    w *= np.repeat(4.0 ** rng.integers(-1, 2, D // (group_size or D)), group_size or D)[:, None]
    options = {"scale_dtype": scale_dtype, **WEIGHTS[weights]}
    weight = quantize(w.astype(np.float32) + 0.3, group_size=group_size, **options)
    if x_dtype == "int8":
        x = rng.integers(-127, 128, (T, D), np.int8)
    else:
        x = (rng.normal(size=(T, D)) + 0.2).astype(jnp.dtype(x_dtype))
    if x_dtype not in ("int8", "float8_e4m3fn"):
        return Case(x, weight)
    return Case(x, weight, (4.0 ** rng.integers(-2, 2, (T, 1))).astype(np.float32))


def true_weight(weight: QuantArray) -> np.ndarray:
    """Compute the formula of `quant_array.py` by indices, float64 [D, F]."""
    d = np.arange(weight.num_rows)
    values = np.asarray(weight.values)
    if weight.bits == 4:
        half = weight.pack_rows // 2
        run, within = np.divmod(d, weight.pack_rows)
        of_row = values[run * half + within % half]
        q = np.where((within >= half)[:, None], of_row >> 4, of_row & 15).astype(np.float64)
    else:
        q = values.astype(np.float64)
    j = d // weight.group_size
    zeros = 8.0 if weight.bits == 4 else 0.0
    if weight.zeros is not None:
        zeros = np.asarray(weight.zeros)[j].astype(np.float64)
    return (q - zeros) * np.asarray(weight.scales)[j].astype(np.float64)


def oracle(case: Case) -> np.ndarray:
    return _true_x(case) @ true_weight(case.weight)


def _true_x(case: Case) -> np.ndarray:
    x = case.x.astype(np.float64)
    return x if case.x_scale is None else x * case.x_scale.astype(np.float64)


def program_of(backend: str | None) -> Any:
    """Return the jitted operator; an emulator's code is compiled unoptimized, since it runs a few
    times."""
    return _unoptimized if backend in EMULATED else _multiply


_multiply = jax.jit(quantized_matmul, static_argnames=STATIC)
_unoptimized = jax.jit(
    quantized_matmul,
    static_argnames=STATIC,
    compiler_options={"xla_backend_optimization_level": 0},
)


@contextlib.contextmanager
def emulators() -> Iterator[None]:
    """Run the kernels in their emulators within this context."""
    activations = mock.patch.dict(ACTIVATION_BACKENDS, EMULATED_ACTIVATIONS)
    with mock.patch.dict(BACKENDS, EMULATED), activations:
        yield


def run(case: Case, backend: str | None, **options: Any) -> np.ndarray:
    """Run the operator, compiled."""
    x, weight, x_scale = jax.tree.map(jnp.asarray, (case.x, case.weight, case.x_scale))
    with emulators():
        return np.asarray(
            program_of(backend)(x, weight, x_scale=x_scale, backend=backend, **options)
        )


def assert_close(out: np.ndarray, case: Case, tolerance: float) -> None:
    """Compare by the norm of all, and row by row and column by column, so that a small one cannot
    hide, relative to the terms of the sums, which may cancel."""
    out = out.astype(np.float64)
    ref, terms = oracle(case), abs(_true_x(case)) @ abs(true_weight(case.weight))
    assert np.isfinite(out).all()
    for axis, size in ((None, ref), (0, terms), (1, terms)):
        norm = lambda a, axis=axis: np.sqrt((a * a).sum(axis=axis))
        error = norm(out - ref) / np.maximum(norm(size), 1e-30)
        assert np.all(error <= tolerance), f"relative error {np.max(error):.2e} along {axis}"


def check(case: Case, backend: str | None, **options: Any) -> None:
    """Check that the backend agrees with the oracle."""
    out = run(case, backend, **options)
    dtype = options.get("out_dtype") or ("float32" if case.x_scale is not None else case.x.dtype)
    assert out.dtype == dtype and out.shape == (case.x.shape[0], case.weight.num_columns)
    names = [out.dtype.name] + ([] if case.x_scale is not None else [case.x.dtype.name])
    assert_close(out, case, max(TOLERANCE[name] for name in names))
