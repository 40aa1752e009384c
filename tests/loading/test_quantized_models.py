"""Models with quantized weights compute what they do with the dequantized weights."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.quantized_matmul import QuantArray, dequantize, quantize
from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.load_report import LoadReport
from jaxinfer.loading.quantize import RECIPES, quantize_parameter
from jaxinfer.loading.safetensors_header import read_safetensors
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight, project_quantized
from tests.support import running
from tests.support.family_bench import make_tensors, recorded, write_huggingface
from tests.support.family_groups import GROUPS
from tests.support.quantized_bench import IDS, quantize_weights, relative, tiny_model, tiny_weights
from tests.support.quantized_checkpoints import QUANTIZATIONS, TINY, write_quantized
from tests.support.tiny_checkpoints import write_checkpoint, write_safetensors


@pytest.mark.matrix
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_packed_weights_give_the_logits_of_their_values(name):
    packed, dequantized, plain = tiny_weights(name)
    for a, b in zip(jax.tree.leaves(dequantized), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    kinds = [type(weight) for weight in packed]
    is_special = "act-order" in name or QUANTIZATIONS[name].activations is not None
    # A layer has seven matrices, with gate and up in one array.
    assert kinds.count(QuantWeight if is_special else QuantArray) == (5 if is_special else 6)
    assert kinds.count(QuantPair) == (1 if is_special else 0)
    expected = running.all_logits(tiny_model(), plain, IDS)
    error = relative(running.all_logits(tiny_model(), packed, IDS), expected)
    if QUANTIZATIONS[name].activations is None:
        assert error <= 1e-5
    else:  # quantized activations must show an error
        assert 1e-4 < error < (0.2 if "float8" in name else 0.06)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_matmul_quantizes_and_reorders_activations(dtype):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 64)).astype(np.float32), rng.normal(size=(64, 24))
    weight = quantize(w.astype(np.float32), 8, is_float=dtype != "int8")
    order = rng.permutation(64).astype(np.int32)
    scale = np.float32(0.02)
    largest = 127 if dtype == "int8" else 448
    scaled = np.clip(x / scale, -largest, largest)
    values = np.rint(scaled) if dtype == "int8" else scaled.astype(jnp.dtype(dtype))
    true = np.asarray(dequantize(weight), np.float64)
    for fixed, expected in (
        (scale, values.astype(np.float64)[:, order] * scale @ true),
        (None, x.astype(np.float64)[:, order] @ true),
    ):
        given = jax.tree.map(jnp.asarray, QuantWeight(weight, order, fixed, dtype))
        out = project_quantized(jnp.asarray(x), given, out_dtype=jnp.float32)
        tolerance = 1e-5 if fixed is not None else 4e-2
        assert relative(np.asarray(out), expected) < tolerance


def only_the_default(devices: list[Any]) -> Any:
    """Imitate `jax.devices` of a process whose JAX_PLATFORMS names only an accelerator."""

    def found(backend: str | None = None) -> list[Any]:
        if backend is not None:
            raise RuntimeError(f"Unknown backend {backend}")
        return devices

    return found


LEAST = {"int8": 1e-4, "int4": 5e-3, "float8": 1e-3, "int8_w8a8": 1e-4, "float8_w8a8": 1e-3}
MOST = {"int8": 0.02, "int4": 0.25, "float8": 0.15, "int8_w8a8": 0.06, "float8_w8a8": 0.2}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", RECIPES)
def test_loading_quantizes_an_unquantized_checkpoint(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "devices", only_the_default(jax.devices()))
    model, checkpoint = tiny_model(), open_checkpoint(write_checkpoint(TINY, tmp_path))
    dense = load_weights(checkpoint, model)
    loaded = load_weights(checkpoint, model, quantize=kind)
    later = quantize_weights(model, dense, kind)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(later), strict=True):
        np.testing.assert_array_equal(a, b)
    is_quantized = [isinstance(w, Quantized) for w in loaded]
    assert is_quantized == [spec.packs == "matrix" for spec in model.parameters]
    expected = running.all_logits(model, dense, IDS)
    error = relative(running.all_logits(model, loaded, IDS), expected)
    assert LEAST[kind] < error < MOST[kind]


def test_quantized_embedding_serves_lookup_and_tied_head(tmp_path):
    folder = write_checkpoint("tied", tmp_path)
    model, dense = running.load(folder)
    weights = quantize_weights(model, dense, "int8", with_embedding=True)
    [table] = [
        w for w, spec in zip(weights, model.parameters, strict=True) if spec.packs == "table"
    ]
    assert isinstance(table, QuantArray)
    expected = running.all_logits(model, dense, IDS)
    assert 1e-4 < relative(running.all_logits(model, weights, IDS), expected) < 0.03


@pytest.mark.parametrize("keep_packed", [False, True])
def test_groups_of_different_sizes_are_refused_by_name(keep_packed, tmp_path):
    folder, _ = write_quantized("gptq act-order", tmp_path)
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {name: tensor.read().copy() for name, tensor in stored.items()}
    layer = "model.layers.0.mlp.up_proj"
    tensors[f"{layer}.g_idx"][:] = 0
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"quantized: {layer}: 64 inputs .* save the model"):
        load_weights(open_checkpoint(folder), tiny_model(), keep_packed=keep_packed)


def test_experts_are_quantized_one_matrix_at_a_time(monkeypatch):
    """A chunk must not span all experts, since it would be only a column or two wide."""
    array = np.random.default_rng(0).normal(size=(3, 64, 40)).astype(np.float32)
    expected = quantize(array, 4, 64, True, scale_dtype=np.float16)
    shapes = []

    def record(w: np.ndarray, *arguments: Any, **options: Any) -> QuantArray:
        shapes.append(w.shape)
        return quantize(w, *arguments, **options)

    monkeypatch.setattr("jaxinfer.loading.quantize.quantize", record)
    monkeypatch.setattr("jaxinfer.loading.quantize.CHUNK_WEIGHTS", 64 * 8)
    spec = ParameterSpec("x", array.shape, array.dtype, array.shape, ("expert", "a", "b"), "matrix")
    found = quantize_parameter(spec, array, RECIPES["int4"])
    assert shapes == [(64, 32), (64, 8)] * 3
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_experts_with_unquantized_activations_are_reported(tmp_path, monkeypatch):
    lines: list[str] = []
    keep = lambda report, model, weights: lines.append(report.summary(model, weights))
    monkeypatch.setattr(LoadReport, "log", keep)
    case = GROUPS["moe"]["mixtral"]
    tensors = make_tensors(recorded("moe")["mixtral"]["shapes"], case.seed)
    checkpoint = open_checkpoint(write_huggingface(case, tensors, tmp_path))
    load_weights(checkpoint, functional_model(checkpoint, Numerics()), quantize="int8_w8a8")
    assert re.search(
        r"activations not quantized to int8: blocks\.0\.\S* and \d+ more, because their matmul",
        lines[0],
    )


def test_dequantized_parameters_are_reported():
    report = LoadReport()
    report.add("dequantized", "blocks.0.mlp.down.weight", "its parts differ")
    report.add("dequantized", "blocks.1.mlp.down.weight", "its parts differ")
    assert report.summary(tiny_model(), tiny_weights("awq")[2]).endswith(
        "4.00 bytes each; dequantized: blocks.0.mlp.down.weight and 1 more, because its parts "
        "differ"
    )
