"""Loading onto a mesh gives every device its shard of the weights, for every kind of checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.kernels.quantized_matmul import QuantArray, quantize
from jaxinfer.kernels.quantized_matmul.quant_array import unpack
from jaxinfer.loading.placement import slice_values
from jaxinfer.loading.splitting import UnpackableError, can_split_rows, split_groups
from jaxinfer.loading.targets import HeadRepeats
from jaxinfer.nn.quantized import QuantPair, QuantWeight
from tests.support.child_process import findings
from tests.support.paths import SUPPORT

SCRIPT = SUPPORT / "sharded_loading_child.py"
FAMILIES = ("llama", "gpt2", "mixtral", "deepseek_v3")
MESHES = ("tensor", "pipe-tensor", "expert-tensor")
HOW = ("float", "int8", "int4", "w8a8", "packed")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """The results of a process with eight devices (tests/support/sharded_loading_child.py)."""
    return findings(SCRIPT, str(tmp_path_factory.mktemp("eight")))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_device_loads_its_shard_of_the_weights(family, mesh, how, found):
    result = found["loaded"][family][f"{mesh} {how}"]
    assert result["wrong"] == []
    # GPT-2 stores matrices with inputs first, unlike any GGUF type, so only embeddings are packed.
    assert result["quantized"] >= (0 if how == "float" else 1 if family == "gpt2" else 6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_are_placed_in_the_same_shards(family, mesh, how, found):
    assert found["loaded"][family][f"{mesh} {how}"]["placed"] == []


def test_sharded_inputs_with_an_activation_order_are_dequantized(found):
    split = ["blocks.0.attention.o.weight", "blocks.0.mlp.down.weight"]
    assert found["act-order"] == {"dense": split, "wrong": []}


def test_stages_with_different_stored_types_are_dequantized_and_logged(found):
    assert found["unlike"]["dense"] == ["blocks.0.mlp.down.weight", "blocks.0.mlp.gate_up"]
    assert found["unlike"]["wrong"] == []
    line = next(line for line in found["unlike"]["lines"] if line.startswith("weights:"))
    assert "dequantized: blocks.0.mlp.down.weight and 1 more, because its stages are" in line


def test_random_weights_equal_those_of_one_device(found):
    assert found["drawn"] == []


@pytest.mark.parametrize("how", ["float", "int8", "int4", "dequantized"])
def test_converted_checkpoint_is_restored_onto_any_mesh(how, found):
    assert found["restored"][how] == []
    assert found["restored"]["quantized"] == 0


def test_each_part_of_a_converted_checkpoint_is_read_once(found):
    assert 1 <= found["restored"]["float read"] < 1.5  # 8 if each device read the whole file


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("name", ["rows", "columns", "stage", "heads"])
def test_device_reads_only_its_part_of_the_file(name, found):
    # The system maps the pages of a file in runs, so somewhat more than the shard is resident.
    assert 1 <= found["touched"][name] < 2


def test_stacked_tensors_are_sharded_or_replicated(found):
    assert found["items"] == {"cut": True, "whole": True}


def test_checkpoint_is_loaded_onto_the_mesh_of_the_config(found):
    assert found["opened"]["wrong"] == []
    assert found["opened"]["pipe-tensor"].startswith(
        "CheckpointError: "
    )  # the tensors were read, and contain NaN


def test_mesh_that_does_not_fit_is_refused_before_tensors_are_read(found):
    assert found["opened"]["pipe"] == (
        "ConfigError: the model has 2 layers, which pipe 8 does not divide; possible sizes: 1, 2"
    )
    assert "must be 8" in found["opened"]["tensor"]


def matrix(bits: int, D: int, group: int | None) -> Any:
    w = np.random.default_rng(0).normal(size=(D, 6)).astype(np.float32)
    return quantize(w, bits, group, has_zeros=bits == 4)


def numbers(weight: QuantArray) -> np.ndarray:
    """Dequantize by the definition in `kernels/quantized_matmul/quant_array.py`."""
    values: Any = unpack(weight.values, weight.pack_rows) if weight.bits == 4 else weight.values
    again = lambda a: np.repeat(a.astype(np.float32), weight.group_size, axis=0)
    zeros = weight.middle if weight.zeros is None else again(weight.zeros)
    return (values.astype(np.float32) - zeros) * again(weight.scales)


@pytest.mark.parametrize(
    ("bits", "D", "group", "parts", "own_group"),
    [
        (8, 64, None, 4, 16),  # a scale a column becomes one for each part
        (8, 64, 32, 2, 32),
        (4, 192, 64, 4, 16),  # groups that parts cut, and bytes that have to be packed anew
        (4, 1024, 128, 2, 128),
    ],
)
def test_every_part_of_a_divided_weight_is_one_by_itself(bits, D, group, parts, own_group):
    weight = matrix(bits, D, group)
    whole = split_groups(weight, parts)
    assert whole.group_size == own_group
    assert can_split_rows(whole, parts)
    assert can_split_rows(weight, parts) == (weight.group_size == own_group)
    rows = D // parts
    for part, expected in enumerate(np.split(numbers(weight), parts)):
        arrays = [np.split(a, parts)[part] for a in (whole.values, whole.scales)]
        zeros = None if whole.zeros is None else np.split(whole.zeros, parts)[part]
        own = dataclasses.replace(whole, values=arrays[0], scales=arrays[1], zeros=zeros)
        own.check()
        assert own.num_rows == rows
        np.testing.assert_array_equal(numbers(own), expected)


def test_groups_that_cannot_be_split_are_refused_with_possible_numbers_of_parts():
    words = (
        r"its 96 inputs into 8 parts of 12, and its groups of 32 into groups of 4 .*; "
        r"possible numbers of parts are 1, 2, 3, 6, "
    )
    with pytest.raises(UnpackableError, match=words):
        split_groups(matrix(8, 96, 32), 8)
    with pytest.raises(
        UnpackableError, match=r"its 24 inputs into 8 parts of 3, .*parts are 1, 2, 3, 4, 6, 12$"
    ):
        split_groups(matrix(4, 24, 24), 8)
    ordered = QuantWeight(matrix(8, 64, 32), order=np.arange(64))
    with pytest.raises(UnpackableError, match="64 inputs are reordered"):
        split_groups(ordered, 2)
    assert split_groups(ordered, 1) is ordered
    pair = QuantPair(QuantWeight(matrix(8, 64, None)), QuantWeight(matrix(8, 64, None)))
    assert split_groups(pair, 2).up.weight.group_size == 32


@pytest.mark.parametrize(
    ("num_stored", "num_repeated", "bounds", "expected"),
    [
        (2, 4, (0, 2), [0, 1]),  # a head of two numbers: a run of the model's own
        (2, 4, (2, 6), [0, 1, 2, 3]),
        (3, 6, (2, 6), [0, 1, 2, 3]),
        (2, 8, (4, 12), [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_kv_heads_are_repeated_side_by_side(num_stored, num_repeated, bounds, expected):
    values = np.arange(num_stored * 2)
    assert (
        slice_values(values, (bounds,), HeadRepeats(-1, num_stored, num_repeated)).tolist()
        == expected
    )
