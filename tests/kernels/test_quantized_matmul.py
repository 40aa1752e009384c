"""The product with quantized weights: every backend compared with the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.quantized_matmul import BACKENDS, quantize_activations, quantized_matmul
from tests.support.quantized_cases import (
    EMULATED,
    WEIGHTS,
    Case,
    assert_close,
    check,
    emulators,
    make_case,
    oracle,
    run,
)
from tests.support.triton_bench import needs_triton

pytestmark = pytest.mark.conformance

every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=needs_triton) if b == "gpu" else b for b in BACKENDS]
)


def calls(cases: Sequence[Any], emulated: Sequence[Any] | None = None) -> Any:
    """Return the pairs to test: every case on every backend, on the slow emulators only some."""
    pairs = []
    for backend in BACKENDS:
        of_backend = cases if backend not in EMULATED or emulated is None else emulated
        marks = [needs_triton] if backend == "gpu" else []
        pairs += [
            pytest.param(backend, case, marks=marks, id=f"{backend}-{case}") for case in of_backend
        ]
    return pytest.mark.parametrize(("backend", "case"), pairs)


ALL = [(weights, group_size) for weights in WEIGHTS for group_size in (None, 32)]
BY_GROUPS = [(weights, 32) for weights in WEIGHTS]
NARROW = [
    (weights, dtype)
    for weights in ("int8", "int4 zeros", "float8")
    for dtype in ("bfloat16", "float16")
]


@pytest.mark.matrix(by="backend")
@calls(ALL, [*BY_GROUPS, ("int8 zeros", None), ("int4", None)])
def test_weights_match_the_formula(backend, case):
    weights, group_size = case
    check(make_case(weights, group_size=group_size), backend)


@pytest.mark.matrix(by="backend")
@calls(NARROW, [pair for pair in NARROW if pair[1] == "bfloat16"])
def test_narrow_activations_match_the_formula(backend, case):
    weights, dtype = case
    check(make_case(weights, group_size=64, x_dtype=dtype), backend)
    check(make_case(weights, x_dtype=dtype), backend, out_dtype="float32")


@pytest.mark.matrix(by="backend")
@calls(ALL, [*BY_GROUPS, ("int8 zeros", None)])
def test_quantized_activations_match_the_formula(backend, case):
    weights, group_size = case
    x_dtype = "float8_e4m3fn" if weights == "float8" else "int8"
    check(make_case(weights, group_size=group_size, x_dtype=x_dtype), backend)


SHAPES = {
    "one token": {"T": 1},
    "more tokens than a tile of decodes": {"T": 33},
    "columns short of a tile": {"F": 5},
    "one column": {"F": 1},
    "one column past tiles": {"F": 257},
    "rows of half a pack": {"D": 192, "group_size": 32},
    "rows of several packs": {"D": 768, "group_size": 128},
    "a group over packs": {"D": 1024, "group_size": 512},
    "rows that no tile divides": {"D": 160, "group_size": 160},
    "bfloat16 scales": {"scale_dtype": jnp.bfloat16, "group_size": 32},
}


@pytest.mark.matrix(by="backend")
@calls([(w, s) for s in SHAPES for w in ("int8 zeros", "int4")], [("int4", s) for s in SHAPES])
def test_shapes_match_the_formula(backend, case):
    weights, shape = case
    check(make_case(weights, **SHAPES[shape]), backend)


@every_backend
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_activations_are_quantized_before_the_product(backend, dtype):
    case = make_case("float8" if dtype == "float8_e4m3fn" else "int8", T=4)
    rows = case.x * np.array([[1e-3], [1.0], [1e3], [0.0]], np.float32)
    out = run(Case(rows, case.weight), backend, activation_dtype=dtype)
    assert out.dtype == np.float32 and (out[3] == 0).all()
    real = Case(rows[:3], case.weight)
    assert_close(out[:3], real, 4e-2 if dtype == "float8_e4m3fn" else 2e-2)


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_quantized_activations_use_the_whole_range(backend, dtype, x_dtype):
    x = np.random.default_rng(0).normal(size=(37, 50)).astype(jnp.dtype(x_dtype))
    x[2] = 0
    x[3] *= 1e-20
    with emulators():
        values, scale = quantize_activations(jnp.asarray(x), dtype, backend=backend)
    assert values.dtype == dtype and scale.shape == (37, 1) and scale.dtype == "float32"
    wide, x = np.asarray(values).astype(np.float64), x.astype(np.float64)
    largest = 127 if dtype == "int8" else 448
    assert np.array_equal(abs(wide).max(axis=1), np.where(np.arange(37) == 2, 0, largest))
    tops = abs(x).max(axis=1, keepdims=True)
    np.testing.assert_allclose(scale, np.where(tops == 0, 1, tops / largest), rtol=1e-6)
    # Half a step: of an int8, or of a float8, which has steps of 2 ** -9 below 2 ** -6.
    step = np.asarray(scale) * (0.5001 if dtype == "int8" else 2.0**-10)
    step = np.maximum(step, 0 if dtype == "int8" else abs(x) / 16 * 1.0001)
    error = abs(wide * np.asarray(scale) - x)
    if backend == "gpu" and dtype != "int8":  # Triton's interpreter truncates where a device rounds
        assert np.linalg.norm(error) <= 0.1 * np.linalg.norm(x)
    else:
        assert (error <= step).all()


@every_backend
def test_quantization_rounds_halves_to_even(backend):
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]], np.float32)
    with emulators():
        values, _ = quantize_activations(jnp.asarray(x), "int8", backend=backend)
    assert np.asarray(values).tolist() == [[127, 0, 2, 2, 0, -2, 126]]


def test_int8_sums_are_exact():
    """2 ** 18 products of 127 x 127 pass what float32 counts in steps of one."""
    case = make_case("int8", T=2, D=2**12, F=3, x_dtype="int8")
    case.weight.scales[:] = 1
    case.x_scale[:] = 1  # type: ignore[index]
    case.x[:] = 127
    case.weight.values[:] = np.array([127, 126, -127])
    case.weight.values[5] = 1
    assert np.array_equal(run(case, "xla"), oracle(case).astype(np.float32))


REFUSED: dict[str, Any] = {
    "x is (2, 64), the weight (128, 4)": {"x": np.ones((2, 64), np.float32)},
    "x is int8 and x_scale missing": {"x": np.ones((2, 128), np.int8)},
    "x is float32 and x_scale given": {"x_scale": np.ones((2, 1), np.float32)},
    "x is int32": {"x": np.ones((2, 128), np.int32)},
    "activations of float8_e4m3fn do not go": {"activation_dtype": "float8_e4m3fn"},
    "x is int8 already": {
        "x": np.ones((2, 128), np.int8),
        "x_scale": np.ones((2, 1), np.float32),
        "activation_dtype": "float8_e4m3fn",
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_do_not_fit_are_refused(message):
    case = make_case("int8", T=2, F=4)
    options: dict[str, Any] = {"x": case.x, **REFUSED[message]}
    x = jnp.asarray(options.pop("x"))
    for name, value in options.items():
        options[name] = jnp.asarray(value) if isinstance(value, np.ndarray) else value
    with pytest.raises(ValueError) as error:
        quantized_matmul(x, case.weight, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "options", [{"activation_dtype": "int4"}, {"x_scale": jnp.ones((3, 1), jnp.float32)}]
)
def test_shapes_against_the_signature_are_refused(options: dict[str, Any]):
    case = make_case("int8", T=2, F=4, x_dtype="int8")
    given: dict[str, Any] = {"x_scale": jnp.asarray(case.x_scale), **options}
    with pytest.raises((ValueError, TypeError), match="|".join(options)):
        quantized_matmul(jnp.asarray(case.x), case.weight, **given)
