"""The gated half of a feed-forward layer: every backend compared with the formula, in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.dispatch import NoBackendError
from jaxinfer.kernels.gated_mlp import BACKENDS, api, gated_mlp, gpu, tpu
from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.kernels.grouped_matmul.tpu_weights import rows_for
from jaxinfer.kernels.grouped_matmul.weights import shape_of
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize, quantize
from jaxinfer.kernels.triton_launch import interpret
from tests.support.gated_cases import (
    EMULATOR,
    QUANTIZED,
    TOLERANCE,
    assert_close,
    each_backend,
    programs,
)

pytestmark = [
    pytest.mark.conformance,
    # exp overflows to infinity in a sigmoid, as it does on a GPU, and the quotient is 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


def _emulated_tpu(x, gate_up, **options):
    """Use small tiles, so that small arrays have several."""
    tiling = tpu.TpuGatedTiling(16, rows_for(gate_up, 128), 128)
    return tpu.gated_mlp(x, gate_up, **options, interpret=EMULATOR, tiling=tiling)


EMULATED = {"tpu": _emulated_tpu, "gpu": partial(gpu.gated_mlp, launch=interpret)}
every_backend = each_backend(BACKENDS)
_well, _unoptimized = programs(gated_mlp, "activation")


def run(x, weight, *, activation="silu", bias=None, backend=None) -> np.ndarray:
    program = _unoptimized if backend in EMULATED else _well
    with mock.patch.dict(BACKENDS, EMULATED):
        return np.asarray(program(x, weight, activation=activation, bias=bias, backend=backend))


def arrays(T: int, D: int, F: int, dtype: Any = "float32", seed: int = 0):
    """Return x, weight and bias, NumPy arrays of `dtype`."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))
    return 3 * normal(T, D), normal(2, D, F) / normal(1)[0].dtype.type(math.sqrt(D)), normal(2, F)


def oracle(x, weight, activation="silu", bias=None) -> np.ndarray:
    """Compute the formula literally, with the activations by Python's `math`."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    gate, up = x @ weight[0], x @ weight[1]
    if bias is not None:
        gate, up = gate + bias[0].astype(np.float64), up + bias[1].astype(np.float64)
    tanh = lambda z: z / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    act = {
        "silu": lambda z: z / (1 + math.exp(-z)),
        "gelu": lambda z: z / 2 * math.erfc(-z / math.sqrt(2)),
        "gelu_pytorch_tanh": tanh,
        "relu": lambda z: max(z, 0.0),
    }[activation]
    return np.vectorize(act)(gate) * up


@pytest.mark.matrix(by=("backend", "activation"))
@every_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_match_the_formula(backend, activation):
    x, weight, bias = arrays(5, 32, 48)
    out = run(x, weight, activation=activation, bias=bias, backend=backend)
    assert_close(out, oracle(x, weight, activation, bias), 1e-5)


# Tokens, D and F on both sides of tiles, and multiples of nothing.
SHAPES = [(1, 128, 128), (3, 37, 41), (33, 256, 130), (70, 96, 260)]


@pytest.mark.matrix(by="backend")
@every_backend
@pytest.mark.parametrize(("T", "D", "F"), SHAPES)
def test_shapes_around_tiles_match_the_formula(backend, T, D, F):
    x, weight, _ = arrays(T, D, F)
    assert_close(run(x, weight, backend=backend), oracle(x, weight), 1e-5)


@every_backend
@pytest.mark.parametrize(("T", "dtype"), [(1, "bfloat16"), (20, "float16")])
def test_narrow_types_match_within_their_precision(backend, dtype, T):
    x, weight, bias = arrays(T, 160, 96, dtype)
    out = run(x, weight, bias=bias, backend=backend)
    assert out.dtype == dtype
    assert_close(out, oracle(x, weight, bias=bias), TOLERANCE[dtype])


@pytest.mark.matrix(by=("backend", "scheme"))
@every_backend
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_weights_match_their_dequantized_values(backend, scheme):
    x, weight, _ = arrays(3, 512, 40)
    x, weight = x.astype(ml_dtypes.bfloat16), quantize(weight, **QUANTIZED[scheme])
    ref = oracle(x, np.asarray(dequantize(weight)))
    assert_close(run(x, weight, backend=backend), ref, 1e-2)


@every_backend
def test_quantized_weights_are_exact_in_float32(backend):
    x, weight, bias = arrays(18, 256, 24)
    weight = quantize(weight, bits=4, group_size=32, has_zeros=True)
    ref = oracle(x, np.asarray(dequantize(weight)), bias=bias)
    assert_close(run(x, weight, bias=bias, backend=backend), ref, 1e-5)


@every_backend
def test_large_gates_do_not_overflow(backend):
    x, weight, _ = arrays(4, 16, 32)
    x = x * 1e4
    gate, up = x.astype(np.float64) @ weight[0], x.astype(np.float64) @ weight[1]
    for activation in ("silu", "gelu_pytorch_tanh"):
        out = run(x, weight, activation=activation, backend=backend)
        assert_close(out, np.maximum(gate, 0) * up, 1e-5)


def test_weight_halves_are_gate_then_up():
    """A matrix [D, 2, F] or [D, 2F] would give other numbers."""
    x, weight, _ = arrays(3, 8, 4)
    off = weight * np.array([[[1.0]], [[0.0]]], np.float32)
    assert not run(x, off, activation="silu").any()
    relu = run(np.abs(x), np.stack([-np.abs(weight[0]), weight[1]]), activation="relu")
    assert not relu.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "activation is 'swish'; it must be one of silu, gelu"),
        ({"gate_up": (3, 8, 4)}, r"gate_up has shape \(3, 8, 4\); it must be \(2, D, F\)"),
        ({"gate_up": (8, 2, 4)}, r"gate_up has shape \(8, 2, 4\)"),
        ({"gate_up": (2, 6, 4)}, "x has 8 columns, each half of gate_up 6 rows"),
        ({"bias": (4,)}, r"bias has shape \(4,\); it must be \(2, 4\)"),
        ({"bias": (2, 8)}, r"bias has shape \(2, 8\); it must be \(2, 4\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    given: dict[str, Any] = {"x": (3, 8), "gate_up": (2, 8, 4), "bias": (2, 4)} | change
    activation = given.pop("activation", "silu")
    specs = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in given.items()}
    with pytest.raises(ValueError, match=message):
        api._check(**specs, activation=activation)


def test_quantized_weight_that_does_not_fit_is_refused():
    x, weight, _ = arrays(3, 64, 8)
    good = quantize(weight, 8)
    bad = QuantArray(good.values, good.scales[..., :4], None, 8, 64)
    with pytest.raises(ValueError, match="scales have shape"):
        run(x, bad)
    with pytest.raises(ValueError, match="x has 32 columns"):
        run(x[:, :32], good)


def test_kernels_decline_float8_weights():
    x, weight, _ = arrays(3, 64, 8)
    weight = quantize(weight, 8, is_float=True)
    ref = oracle(x, np.asarray(dequantize(weight)))
    assert_close(run(x, weight), ref, 1e-5)
    with pytest.raises(NoBackendError, match="tpu: float8 weights are not read here"):
        gated_mlp(
            jnp.asarray(x), jax.tree.map(jnp.asarray, weight), activation="silu", backend="tpu"
        )


@pytest.mark.parametrize(
    ("device", "T", "taker"),
    [("TPU v6 lite", 64, "xla"), ("TPU v6 lite", 128, "tpu"), ("TPU v5 lite", 64, "tpu")],
)
def test_tpu_kernel_is_chosen_only_where_it_saves_work(device, T, taker, monkeypatch):
    """Quantized weights always use the kernel, and so does a call that names it."""
    x, weight = jnp.zeros((T, 32), jnp.bfloat16), jnp.zeros((2, 32, 14336), jnp.bfloat16)
    taken = []

    def fake(name, x, gate_up, **options):
        taken.append(name)
        return jnp.zeros((T, shape_of(gate_up)[2]), x.dtype)

    for name in BACKENDS:
        monkeypatch.setitem(BACKENDS, name, partial(fake, name))
    chip = AbstractDevice(device_kind=device, num_cores=1, platform="tpu")
    narrow = jax.tree.map(jnp.asarray, quantize(np.ones((2, 32, 8), np.float32), 8))
    of_silu = partial(gated_mlp, activation="silu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=chip)):
        jax.eval_shape(of_silu, x, weight)
        jax.eval_shape(of_silu, x, narrow)
        jax.eval_shape(partial(of_silu, backend="tpu"), x, weight)
    assert taken == [taker, "tpu", "tpu"]
