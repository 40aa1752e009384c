"""Quantized tensors of every stored format are read as the format defines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.loading import CheckpointError, open_checkpoint, splitting
from jaxinfer.loading.assign import load_weights
from jaxinfer.loading.checkpoint import StoredTensor
from jaxinfer.loading.mxfp4 import read_mxfp4
from jaxinfer.loading.packing import pack_parameter
from jaxinfer.loading.quantized.gguf_blocks import BLOCKS, read_blocks
from jaxinfer.loading.quantized.rows import QuantRows
from jaxinfer.loading.quantized.scheme import merge_quantized_layers
from jaxinfer.loading.splitting import UnpackableError, place_whole
from jaxinfer.loading.targets import LoadTarget
from jaxinfer.models.family import (
    AS_STORED,
    LINEAR,
    LINEAR_JOINED,
    LINEAR_PAIRED,
    Transform,
    every_other,
    fused_part,
)
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import QuantPair
from tests.support.quantized_bench import tiny_model
from tests.support.quantized_cases import true_weight
from tests.support.quantized_checkpoints import (
    QUANTIZATIONS,
    compressed,
    is_quantized,
    set_quantization,
    write_quantized,
)
from tests.support.tiny_checkpoints import write_checkpoint, write_safetensors

FLOAT32 = np.dtype(np.float32)
# Offsets of the float16 numbers in a block of each GGUF type.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208], "MXFP4": []}
# The error relative to the largest weight; 0 for types that are read exactly.
GGUF_ERROR = {"Q8_0": 0.0, "Q4_0": 0.0, "Q4_1": 2**-11, "Q4_K": 2**-10, "Q6_K": 2**-11}
GGUF_ERROR["MXFP4"] = 0.0


def gguf_bytes(kind: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Make random blocks, with float16 numbers of usual magnitude."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, BLOCKS[kind][1]), np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(size=(num_blocks, 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":  # a power of two
        raw[:, 0] = rng.integers(100, 150, num_blocks)
    return raw


@pytest.mark.parametrize("kind", BLOCKS)
def test_packed_gguf_types_equal_the_gguf_packages_dequantization(kind):
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == BLOCKS[kind]
    shape = (2, 5, 512)
    raw = gguf_bytes(kind, 2 * 5 * 512 // BLOCKS[kind][0])
    expected = quants.dequantize(raw.reshape(10, -1), GGMLQuantizationType[kind]).reshape(shape)
    rows = read_blocks(raw.reshape(-1), shape, kind)
    assert rows.is_finite()
    error = abs(rows.dequantize(FLOAT32) - expected).max()
    assert error <= GGUF_ERROR[kind] * abs(expected).max()


def test_gguf_block_with_a_zero_scale_reads_as_its_minimum():
    raw = gguf_bytes("Q4_1", 4)
    halves = np.array([[0, 0.5], [0, 0], [2**-24, 100], [1, -3]], np.float16)
    raw[:, :4] = halves.view(np.uint8)
    expected = quants.dequantize(raw, GGMLQuantizationType.Q4_1)
    out = read_blocks(raw.reshape(-1), (4, 32), "Q4_1").dequantize(FLOAT32)
    np.testing.assert_allclose(out, expected, rtol=2**-10)
    assert (out[:2] == expected[:2]).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_non_finite_gguf_scales_are_detected(kind):
    raw = gguf_bytes(kind, 4)
    if kind == "MXFP4":
        raw[1, 0] = 255  # NaN
    else:
        raw[1, HALVES[kind][0] : HALVES[kind][0] + 2] = [0, 0x7C]  # infinity
    assert not read_blocks(raw.reshape(-1), (4, BLOCKS[kind][0]), kind).is_finite()


def test_mxfp4_values_equal_the_specifications_table():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 3, 4, 16), np.uint8)
    scales = rng.integers(0, 252, (2, 3, 4), np.uint8)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.empty((2, 128, 3))
    for e, out, group, i in np.ndindex(2, 3, 4, 32):
        code = int(blocks[e, out, group, i // 2]) >> (4 * (i % 2)) & 15
        value = (
            (-1) ** (code // 8) * magnitudes[code % 8] * 2.0 ** (int(scales[e, out, group]) - 127)
        )
        expected[e, 32 * group + i, out] = value
    found = read_mxfp4(blocks, scales).dequantize(FLOAT32)
    np.testing.assert_array_equal(found, expected)
    scales[0, 0, 0] = 255
    assert not read_mxfp4(blocks, scales).is_finite()


@pytest.fixture(scope="module", params=QUANTIZATIONS)
def folders(request, tmp_path_factory) -> tuple[str, Path, Path]:
    return request.param, *write_quantized(request.param, tmp_path_factory.mktemp("quantized"))


def test_tensors_of_a_quantized_layer_merge_into_one_weight(folders):
    name, quantized, plain = folders
    stored, true = open_checkpoint(quantized).tensors, open_checkpoint(plain).tensors
    tensors = {n: tensor for n, tensor in stored.items() if not n.endswith(".bias")}
    assert set(tensors) == set(true)
    for tensor_name, tensor in tensors.items():
        expected = true[tensor_name].read()
        out = tensor.read()
        assert tensor.shape == true[tensor_name].shape == out.shape
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)
        assert tensor.is_packable == is_quantized(tensor_name)
        if tensor.is_packable:
            assert tensor.nbytes < 0.5 * true[tensor_name].nbytes + 1024
            rows = tensor.read_packed()
            assert rows is not None and rows.is_finite()
            assert rows.activation_dtype == QUANTIZATIONS[name].activations
            assert (rows.order is not None) == ("act-order" in name)


def spec(
    *shape: int, dims: tuple[int, ...] = (), axes: tuple[str, ...] = (), packs: Any = "matrix"
):
    dims = dims or shape
    return ParameterSpec("x", shape, FLOAT32, dims, axes or ("model",) * len(dims), packs)


def some_rows(bits: int, out: int, inputs: int, seed: int = 0, group: int = 16) -> QuantRows:
    rng = np.random.default_rng(seed)
    low, high, dtype = (0, 16, np.uint8) if bits == 4 else (-127, 128, np.int8)
    return QuantRows(
        rng.integers(low, high, (out, inputs)).astype(dtype),
        rng.uniform(0.5, 2, (out, inputs // group)).astype(np.float16),
        rng.integers(0, 9, (out, inputs // group)).astype(np.float16) if seed % 2 else None,
        bits,
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("transform", "dims", "num_out"),
    [
        (LINEAR, (32, 24), 24),
        (LINEAR_PAIRED, (32, 3, 8), 24),
        (fused_part(LINEAR, 4, 40), (32, 24), 40),
    ],
)
def test_transform_applies_to_values_scales_and_zeros(transform, dims, num_out, bits):
    for seed in (0, 1):
        rows = some_rows(bits, num_out, 32, seed)
        packed: Any = pack_parameter(spec(32, 24, dims=dims), [rows], transform, dims)
        packed.check()
        expected = transform.read(rows.dequantize(FLOAT32), dims).reshape(32, 24)
        np.testing.assert_array_equal(true_weight(packed), expected)


def test_embedding_table_packs_as_the_transposed_matrix():
    rows = some_rows(8, 40, 32, seed=1)
    packed: Any = pack_parameter(spec(40, 32, packs="table"), [rows], AS_STORED, (40, 32))
    np.testing.assert_array_equal(true_weight(packed), rows.dequantize(FLOAT32).T)


def test_several_stored_tensors_stack_into_one_parameter():
    parts = [some_rows(4, 24, 32, seed) for seed in (0, 1, 2)]  # only the second has zeros
    packed: Any = pack_parameter(spec(3, 32, 24), parts, LINEAR, (32, 24))
    packed.check()
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(true_weight(packed[i]), part.dequantize(FLOAT32).T)


@pytest.mark.parametrize("has_order", [False, True])
def test_joined_gate_and_up_keep_order_and_activation_scale(has_order):
    rows = some_rows(8, 48, 32, seed=1)
    rows = dataclasses.replace(
        rows,
        order=np.random.default_rng(0).permutation(32).astype(np.int32) if has_order else None,
        activation_dtype="int8",
        input_scale=np.float32(0.5).reshape(()),
    )
    weight = spec(2, 32, 24, axes=("half", "model", "mlp"))
    packed: Any = pack_parameter(weight, [rows], LINEAR_JOINED, weight.dims)
    assert isinstance(packed, QuantPair)
    expected = LINEAR_JOINED.read(rows.dequantize(FLOAT32), weight.dims)
    for half, matrix in zip((packed.gate, packed.up), expected, strict=True):
        assert (half.activation_dtype, half.x_scale) == ("int8", 0.5)
        inputs = np.arange(32) if half.order is None else half.order
        np.testing.assert_array_equal(true_weight(half.weight), matrix[inputs])
        assert (half.order is not None) == has_order


def test_float16_scales_are_float32_on_a_tpu(monkeypatch):
    rows = some_rows(8, 24, 32, seed=1)
    packed = pack_parameter(spec(32, 24), [rows], LINEAR, (32, 24))
    for platform, dtype in (("cpu", "float16"), ("tpu", "float32")):
        monkeypatch.setattr(splitting, "platform", lambda platform=platform: platform)
        placed = place_whole(LoadTarget(spec(32, 24), (spec(32, 24),)), lambda i: packed)
        assert placed.scales.dtype == placed.zeros.dtype == dtype and placed.values.dtype == "int8"


def test_transposed_matrices_pack_every_other_output():
    blocks = np.random.default_rng(0).integers(0, 256, (2, 12, 3, 16), np.uint8)
    scales = np.full((2, 12, 3), 120, np.uint8)
    weight = spec(2, 96, 6)
    packed: Any = pack_parameter(weight, [read_mxfp4(blocks, scales)], every_other(1), weight.dims)
    expected = read_mxfp4(blocks, scales).dequantize(FLOAT32)[..., 1::2]
    for e in range(2):
        np.testing.assert_array_equal(true_weight(packed[e]), expected[e])


def test_packing_refuses_cut_inputs_and_mixed_schemes():
    cut = Transform(lambda shape: shape, lambda stored, shape: stored[:, ::2].T)
    with pytest.raises(UnpackableError, match="inputs are cut or reordered"):
        pack_parameter(spec(16, 24), [some_rows(8, 24, 32)], cut, (16, 24))
    with pytest.raises(UnpackableError, match="in different ways"):
        parts = [some_rows(8, 24, 32), some_rows(4, 24, 32)]
        pack_parameter(spec(2, 32, 24), parts, LINEAR, (32, 24))


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*fetch"),
    "awq of gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, "bits is 3; this build reads 4 and 8"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    "other formats": (compressed("nvfp4-pack-quantized", {}), "nvfp4-pack-quantized"),
    "2 of 4 sparsity": (
        {**compressed("pack-quantized", {}), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse-24-bitmask",
    ),
    "activations of a group": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {"num_bits": 8, "type": "int", "strategy": "group", "dynamic": True},
        ),
        "input_activations' strategy is 'group'",
    ),
    "rotations": (
        {**compressed("int-quantized", {}), "transform_config": {"config_groups": {"R1": {}}}},
        "transform_config is",
    ),
    "quantized outputs": (
        {
            **compressed("int-quantized", {}),
            "config_groups": {"group_0": {"output_activations": {"num_bits": 8}}},
        },
        "output_activations is",
    ),
    "awq without groups": (
        {"quant_method": "awq", "bits": 4, "group_size": None},
        "group_size is None; it must be a whole number",
    ),
    "gptq of 4.0 bits": ({"quant_method": "gptq", "bits": 4.0}, "bits is 4.0"),
    "one number for a block": (
        {"quant_method": "fp8", "weight_block_size": 5},
        "weight_block_size is 5; it must be two whole numbers",
    ),
    "a list of groups": (
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        "config_groups is .1.; it must be an object",
    ),
    "no regular expression": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"targets": ["re:("], "weights": {"num_bits": 4}}},
        },
        "targets is .*regular expression",
    ),
    "a list for a format": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": ["gptq"]},
        "checkpoint_format is",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_quantizations_are_refused_by_name_with_a_remedy(name, tmp_path):
    config, message = REFUSED[name]
    folder = write_checkpoint("gqa", tmp_path)
    set_quantization(folder, config)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(folder)
    assert "unquantized" in str(error.value) and "quantize=int8" in str(error.value)


def test_quantization_config_that_is_a_list_is_refused(tmp_path):
    folder = write_checkpoint("gqa", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": [1]}))
    with pytest.raises(CheckpointError, match="quantization_config is a JSON list"):
        open_checkpoint(folder)


LAYER = "model.layers.0.mlp.up_proj"
INT8, FLOAT8 = ("int8 tensors", "float8_e4m3fn tensors")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (["Linear"], [LAYER], FLOAT8),  # a name takes precedence over the class in either order
        ([LAYER], ["Linear"], INT8),
        (["Linear"], [r"re:.*mlp\.up"], FLOAT8),  # a pattern matches the start of a name
        ([r"re:.*up_proj"], [LAYER], FLOAT8),
        (["Linear"], ["up_proj"], INT8),  # a name must match completely
        (["Linear"], [r"re:mlp"], INT8),
    ],
)
def test_layer_gets_its_closest_config_group(first, second, expected):
    by_channel = {"strategy": "channel", "num_bits": 8}
    groups = {
        "a": {"targets": first, "weights": {"type": "int", **by_channel}},
        "b": {"targets": second, "weights": {"type": "float", **by_channel}},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": groups,
    }
    value, dtype = (np.int8, "I8") if expected == INT8 else (ml_dtypes.float8_e4m3fn, "F8_E4M3")
    stored = {
        "weight": StoredTensor("w", (4, 8), dtype, 32, lambda _: np.ones((4, 8), value)),
        "weight_scale": StoredTensor("s", (4, 1), "F32", 16, lambda _: np.ones((4, 1))),
        "k_proj.output_scale": StoredTensor("c", (1,), "F32", 4, lambda _: np.ones(1)),
        "q_scale": StoredTensor("q", (1,), "F32", 4, lambda _: np.ones(1)),
    }
    problems: list[str] = []
    stored = {f"{LAYER}.{n}": t for n, t in stored.items()}
    merged = merge_quantized_layers(Path("x"), stored, config, problems)
    assert not problems
    assert {name: tensor.dtype for name, tensor in merged.items()} == {f"{LAYER}.weight": expected}


def test_zero_bias_of_a_quantized_layer_is_ignored(tmp_path):
    folder, _ = write_quantized("gptq", tmp_path)
    tensors = {name: tensor.read().copy() for name, tensor in _stored(folder).items()}
    load_weights(open_checkpoint(folder), tiny_model())
    name = "model.layers.0.mlp.up_proj.bias"
    tensors[name][1] = 0.5
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"{name}.*belongs to no parameter"):
        load_weights(open_checkpoint(folder), tiny_model())


def test_all_problems_of_a_quantized_checkpoint_are_listed_in_one_error(tmp_path):
    folder, _ = write_quantized("awq", tmp_path)
    tensors = {name: tensor.read().copy() for name, tensor in _stored(folder).items()}
    layer = "model.layers.0.self_attn"
    del tensors[f"{layer}.q_proj.scales"]
    tensors[f"{layer}.k_proj.scales"] = tensors[f"{layer}.k_proj.scales"][:, 1:].copy()
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    missing = f"{layer}.q_proj.scales is missing, although the file has {layer}.q_proj.qweight"
    assert missing in str(error.value)
    assert f"{layer}.k_proj.scales has shape [2, 31]; expected [2, 32]" in str(error.value)


def _stored(folder: Path) -> dict[str, Any]:
    """Return the tensors as stored in the file."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": None}))
    tensors = dict(open_checkpoint(folder).tensors)
    path.write_text(json.dumps(config))
    return tensors


def test_nan_in_float8_values_is_detected():
    values = np.ones((2, 4), ml_dtypes.float8_e4m3fn)
    scales = np.ones((2, 1), np.float32)
    assert QuantRows(values, scales, None, 8).is_finite()
    values[1, 2] = np.nan
    assert not QuantRows(values, scales, None, 8).is_finite()
