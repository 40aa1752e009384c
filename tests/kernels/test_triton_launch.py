"""Triton launches: one description for the device, the interpreter and the recorder."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels import triton_launch
from jaxinfer.kernels.triton_launch import (
    Recorder,
    TritonLaunch,
    capability_in_use,
    check_schedule,
    compute_capability,
    interpret,
    jax_triton,
    require_float8,
    require_triton,
)
from tests.support.triton_bench import needs_triton


def kernel(*names: str) -> Any:
    """Return a fake with what a launch needs of a function under triton.jit."""
    return SimpleNamespace(arg_names=list(names), __name__="_kernel")


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def launch(**changes: Any) -> TritonLaunch:
    values = {
        "kernel": kernel("x", "n", "scale", "flag", "y", "BLOCK"),
        "grid": (4,),
        "inputs": (spec(8, dtype="bfloat16"), 3, 0.5, True),
        "outputs": (spec(8, dtype="int8"),),
        "constexprs": {"BLOCK": 16},
    }
    return TritonLaunch(**(values | changes))


def test_signature_has_every_type_and_ones_are_constexprs():
    assert launch().signature == {
        "x": "*bf16",
        "n": "i32",
        "scale": "fp32",
        "flag": "constexpr",
        "y": "*i8",
        "BLOCK": "constexpr",
    }
    assert launch().all_constexprs == {"BLOCK": 16, "flag": 1}
    assert launch().attributes == {(i,): [["tt.divisibility", 16]] for i in (0, 4)}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"inputs": (spec(8), 2**31, 0.5, 2)}, "2147483648 is no int32"),
        ({"inputs": (spec(8), 3)}, "it was given 3 inputs and outputs"),
        ({"constexprs": {"BLOCK": 16, "TYPO": 1}}, "TYPO"),
    ],
)
def test_launch_that_does_not_fit_its_kernel_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        launch(**changes)


def test_unsupported_array_type_is_declined():
    with pytest.raises(NotImplementedError, match="complex64"):
        assert launch(inputs=(spec(8, dtype="complex64"), 3, 0.5, 2)).signature


def test_recorder_keeps_launches_and_returns_their_shapes():
    recorder = Recorder()
    [out] = jax.eval_shape(lambda x: recorder(launch(inputs=(x, 3, 0.5, 2))), spec(8))
    assert (out.shape, out.dtype) == ((8,), jnp.int8)
    assert [kept.grid for kept in recorder.launches] == [(4,)]


def traced_for(kind: str) -> Any:
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def test_compute_capability_of_the_traced_gpu():
    assert compute_capability() is None
    with traced_for("NVIDIA H200"):
        assert compute_capability() == 90
    with traced_for("NVIDIA A100-SXM4-40GB"):
        assert compute_capability() == 80
    with traced_for("Voodoo2"), pytest.raises(NotImplementedError, match="Voodoo2"):
        compute_capability()


@pytest.mark.parametrize(
    ("says", "expected"), [("9.0", 90), ("8.6", 86), ("12.0", 120), ("gfx942", None), (None, None)]
)
def test_capability_in_use_is_parsed_from_the_device(monkeypatch, says, expected):
    device = SimpleNamespace() if says is None else SimpleNamespace(compute_capability=says)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert capability_in_use() == expected
    if says == "8.6":
        with pytest.raises(NotImplementedError, match="sm_86 has no float8_e4m3fn; sm_89"):
            require_float8()
    else:
        require_float8()
    with traced_for("NVIDIA A100-SXM4-40GB"):
        assert capability_in_use() == 80


def test_invalid_schedule_is_refused():
    check_schedule(1, 1)
    for warps, stages, words in (
        (0, 1, "num_warps is 0; it must be a power of two"),
        (6, 1, "num_warps is 6; it must be a power of two"),
        (4, 0, "num_stages is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            check_schedule(warps, stages)


def test_jax_triton_gets_32_bit_scalars_and_aliases_counted_by_arrays(monkeypatch):
    calls: list[tuple[Any, Any]] = []

    def triton_call(*args, **options):
        calls.append((args, options))
        return [jnp.zeros(8)]

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    x = jnp.ones(8)
    jax_triton(
        launch(
            kernel=kernel("n", "scale", "flag", "x", "y", "BLOCK"),
            inputs=(3, 0.5, True, x),
            outputs=(spec(8),),
            aliases={3: 0},
        )
    )
    [(args, options)] = calls
    assert args[0] == 3 and args[2] == 1 and args[3] is x
    assert type(args[1]) is np.float32 and type(args[2]) is int
    assert options["input_output_aliases"] == {0: 0}
    assert options["grid"] == (4,) and options["BLOCK"] == 16 and options["name"] == "kernel"


def test_backend_declines_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotImplementedError, match=r"pip install 'jaxinfer\[triton\]'"):
        require_triton()


def test_backend_declines_without_jax_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(NotImplementedError, match=r"jax-triton.*pip install 'jaxinfer\[triton\]'"):
        jax_triton(launch())


def test_compiled_kernel_cannot_be_interpreted():
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        interpret(launch())


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_interpreter_runs_inside_and_outside_jit(dtype):
    from tests.support.triton_kernels import scaled_sum

    x = jnp.arange(20).astype(dtype)

    def call(x):
        out = spec(20, dtype=dtype)
        return interpret(TritonLaunch(scaled_sum, (2,), (x, 20, 3, 0.5), (out,), {"BLOCK": 16}))[0]

    expected = np.asarray(x.astype("float32") * 3 * 0.5).astype(x.dtype)
    assert np.array_equal(call(x), expected) and np.array_equal(jax.jit(call)(x), expected)


@needs_triton
def test_unwritten_outputs_are_poison():
    from tests.support.triton_kernels import scaled_sum

    x = jnp.ones(20)
    outputs = {dtype: spec(20, dtype=dtype) for dtype in ("float32", "int8")}
    for dtype, out in outputs.items():
        [y] = interpret(TritonLaunch(scaled_sum, (1,), (x, 20, 1, 1.0), (out,), {"BLOCK": 16}))
        rest = np.asarray(y[16:])
        assert (np.isnan(rest) if dtype == "float32" else rest == -128).all()
        assert (np.asarray(y[:16]) == 1).all()


@needs_triton
def test_aliased_output_shares_its_inputs_memory():
    from tests.support.triton_kernels import add_into

    before = jnp.full(20, 7.0)
    one = TritonLaunch(
        add_into, (1,), (jnp.ones(16), before), (spec(20),), {"BLOCK": 16}, aliases={1: 0}
    )
    [y] = interpret(one)
    assert (np.asarray(y[:16]) == 8).all() and (np.asarray(y[16:]) == 7).all()
    assert (np.asarray(before) == 7).all(), "JAX's own array is not touched"


@needs_triton
def test_interpreter_multiplies_bfloat16_values():
    from tests.support.triton_kernels import product

    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(16, 16)), jnp.bfloat16) for _ in range(2))
    one = TritonLaunch(product, (1,), (x, y), (spec(16, 16),), {"N": 16})
    expected = np.asarray(x, np.float32) @ np.asarray(y, np.float32)
    assert np.allclose(interpret(one)[0], expected, rtol=1e-5, atol=1e-5)


def test_module_imports_without_triton_and_jax_triton():
    source = Path(triton_launch.__file__).read_text(encoding="utf-8")
    assert not re.findall(r"^(?:import|from) (?:jax_)?triton\b", source, re.MULTILINE)
