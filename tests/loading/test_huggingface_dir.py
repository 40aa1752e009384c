"""Hugging Face directories: weights and metadata are read, or all problems are listed."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.loading import CheckpointError, hub, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.safetensors_header import read_safetensors
from jaxinfer.nn.layers import Numerics
from tests.support.tiny_checkpoints import write_checkpoint

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], pad: int = 0) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {
            "dtype": NAMES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 + pad)  # a pad of 1 makes the data unaligned
    data = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_raw_header(path: Path, header: Any, data_size: int = 64) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_size))
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), "utf-8")


def tensors_named(*names: str) -> dict[str, np.ndarray]:
    return {name: np.full((2, 3), i, np.float32) for i, name in enumerate(names)}


@pytest.fixture
def model(tmp_path) -> Path:
    """Write a directory with a config and one weights file."""
    write_json(tmp_path / "config.json", {"model_type": "llama", "eos_token_id": 7})
    write_safetensors(tmp_path / "model.safetensors", tensors_named("a", "b"))
    return tmp_path


def refused(source: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    return str(caught.value)


# Weights


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("pad", [0, 1])
def test_safetensors_tensor_keeps_dtype_shape_and_values(name, pad, tmp_path):
    values = (np.arange(12).reshape(3, 4) % 3 + 1).astype(DTYPES[name])
    write_safetensors(tmp_path / "a.safetensors", {"w": values}, pad)
    tensor = read_safetensors(tmp_path / "a.safetensors")["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (name, (3, 4), values.nbytes)
    read = tensor.read()
    assert read.dtype == values.dtype
    assert read.flags.aligned
    np.testing.assert_array_equal(read, values)


def test_four_bit_tensor_reads_as_bytes_of_two_values(tmp_path):
    header = {"w": {"dtype": "F4", "shape": [8, 16], "data_offsets": [0, 64]}}
    tensor = read_safetensors(write_raw_header(tmp_path / "a.safetensors", header))["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("F4", (8, 8), 64)
    assert tensor.read().dtype == np.uint8


def test_files_written_by_the_safetensors_package_are_read(tmp_path):
    from safetensors.numpy import save_file

    tensors = {**tensors_named("x", "y"), "scalar": np.array(3.5), "none": np.zeros((0, 4))}
    save_file(tensors, tmp_path / "a.safetensors", {"format": "np"})
    read = read_safetensors(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(read[name].read(), values)


def test_safetensors_read_maps_without_copying(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"w": np.zeros((1024, 1024), np.float32)})
    tensor = read_safetensors(tmp_path / "a.safetensors")["w"]
    tracemalloc.start()
    try:
        values = tensor.read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0] = 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux' /proc")
def test_dropped_tensor_leaves_the_resident_set(tmp_path):
    size = 8 * 2**20
    tensors = {f"t{i}": np.ones(size, np.uint8) for i in range(8)}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    del tensors
    stored = read_safetensors(tmp_path / "a.safetensors")

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident_bytes()
    for tensor in stored.values():
        assert tensor.read().sum() == size
        assert resident_bytes() - before < 2.5 * size


def test_directory_opens_with_its_config_and_tensors(model):
    checkpoint = open_checkpoint(model)
    assert checkpoint.format == "safetensors"
    assert checkpoint.name == model.name
    assert checkpoint.metadata == {"model_type": "llama", "eos_token_id": 7}
    assert {name: t.shape for name, t in checkpoint.tensors.items()} == {"a": (2, 3), "b": (2, 3)}


def write_shards(folder: Path) -> dict[str, str]:
    """Write two shards and their index; return the index's map."""
    write_json(folder / "config.json", {})
    write_safetensors(folder / "s1.safetensors", tensors_named("a", "b"))
    write_safetensors(folder / "s2.safetensors", tensors_named("c"))
    weight_map = {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return weight_map


def test_shards_of_an_index_open_as_one_model(tmp_path):
    write_shards(tmp_path)
    assert open_checkpoint(tmp_path).tensors.keys() == {"a", "b", "c"}


def test_all_problems_of_shards_are_listed_in_one_error(tmp_path):
    weight_map = write_shards(tmp_path)
    weight_map |= {"lost": "s1.safetensors", "gone": "s3.safetensors"}
    del weight_map["b"]
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    os.truncate(tmp_path / "s2.safetensors", (tmp_path / "s2.safetensors").stat().st_size - 1)
    error_text = refused(tmp_path)
    for message in (
        "s1.safetensors lacks tensor 'lost'",
        "s1.safetensors has tensor 'b', which model.safetensors.index.json places in None",
        "shard s3.safetensors is missing (1 tensors)",
        "truncated",
    ):
        assert message in error_text


@pytest.mark.parametrize("name", ["../s1.safetensors", "sub/s1.safetensors", "", 5, None])
def test_index_with_paths_outside_its_directory_is_refused(name, tmp_path):
    write_shards(tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": name}})
    assert "plain file names" in refused(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ([], "not an object"),
        ({"w": 5}, "described by 5"),
        ({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, "dtype 'F6_E2M3'"),
        ({"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, "is odd"),
        ({"w": {"dtype": "F4", "shape": [], "data_offsets": [0, 1]}}, "is odd"),
        ({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 4]}}, "needs 2 bytes"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "has shape [-1]"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "has shape [True]"),
        ({"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, "has shape 1"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "data_offsets [0]"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "needs 4 bytes"),
        ({"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 64]}}, "needs 73,786,97"),
        ({"w": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}, "truncated"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "belong to no tensor"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [48, 64]}}, "follows a gap"),
        (
            {
                "v": {"dtype": "F32", "shape": [12], "data_offsets": [0, 48]},
                "w": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]},
            },
            "'w' overlaps",
        ),
    ],
)
def test_damaged_safetensors_header_is_refused_by_name(header, message, tmp_path):
    path = write_raw_header(tmp_path / "a.safetensors", header)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert message in str(caught.value)
    assert "a.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", (2**60).to_bytes(8, "little"), (100).to_bytes(8, "little")]
)
def test_truncated_safetensors_file_is_refused_without_reading(content, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated"):
        read_safetensors(tmp_path / "a.safetensors")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_safetensors_file_works_or_is_refused(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    write_safetensors(path, tensors_named("a", "b"))
    content = bytearray(path.read_bytes())
    for where in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[where] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.one_of(st.none(), st.integers(0, len(content))))])
    try:
        for tensor in read_safetensors(path).values():
            assert tensor.read().shape == tensor.shape
    except CheckpointError:
        pass


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickled_weights_are_refused_with_a_remedy(name, tmp_path):
    write_json(tmp_path / "config.json", {})
    (tmp_path / name).write_bytes(b"\x80\x04.")
    error_text = refused(tmp_path)
    assert name in error_text
    assert "convert the model to safetensors" in error_text


@pytest.mark.parametrize(
    "names",
    [
        ("gptq_model-4bit-128g.safetensors",),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("model.safetensors", "other.safetensors"),
        ("model.safetensors", "consolidated.safetensors"),
        ("weights.safetensors", "consolidated-00001-of-00001.safetensors", "adapter_a.safetensors"),
    ],
)
def test_weights_files_of_other_names_are_found(names, tmp_path):
    write_json(tmp_path / "config.json", {})
    for i, name in enumerate(names):
        write_safetensors(tmp_path / name, tensors_named(f"{'a' if i == 0 else 'b'}"))
    expected = {"a", "b"} if names[0].startswith("model-") else {"a"}
    assert open_checkpoint(tmp_path).tensors.keys() == expected


def test_single_index_of_another_name_is_used(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "x.safetensors.index.json")
    write_json(tmp_path / "consolidated.safetensors.index.json", {})
    assert open_checkpoint(tmp_path).tensors.keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("consolidated.safetensors",), "a publisher's own tensor names"),
        (("adapter_model.safetensors",), "an adapter"),
        (("a.safetensors", "b.safetensors"), "rename a single file to model.safetensors"),
        (("m-00001-of-00002.safetensors",), "shard m-00002-of-00002.safetensors is missing"),
        (("m-00001-of-00002.safetensors", "x.safetensors"), "fetch the index"),
        (("m-00001-of-00001.safetensors", "n-00001-of-00001.safetensors"), "fetch the index"),
        (("m-00001-of-00002.safetensors", "m-00001-of-00003.safetensors"), "fetch the index"),
        (("m-00001-of-99999.safetensors",), "claims 99,999 shards; 1 to 1,000 are allowed"),
    ],
)
def test_unusable_weights_files_are_refused_by_name(names, message, tmp_path):
    write_json(tmp_path / "config.json", {})
    for name in names:
        write_safetensors(tmp_path / name, tensors_named("a"))
    error_text = refused(tmp_path)
    assert message in error_text and "\n" not in error_text


def test_tensor_in_two_unindexed_shards_is_refused(tmp_path):
    write_json(tmp_path / "config.json", {})
    for i in (1, 2):
        write_safetensors(tmp_path / f"m-0000{i}-of-00002.safetensors", tensors_named("a"))
    assert "has tensor 'a', as another shard does" in refused(tmp_path)


def test_empty_directory_is_refused_with_all_missing_files(tmp_path):
    error_text = refused(tmp_path)
    assert "config.json" in error_text
    assert "has no weights" in error_text


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b'{"a": 1' + b"0" * 5000 + b"}"]
)
def test_damaged_config_is_refused(content, model):
    (model / "config.json").write_bytes(content)
    assert "config.json" in refused(model)


# From tensors to parameters


def test_weight_table_can_ignore_tensors_of_another_modality(tmp_path):
    folder = write_checkpoint("gqa", tmp_path)
    tensors = read_safetensors(folder / "model.safetensors")
    vision = {"vision_tower.layers.0.weight": np.zeros((2, 3), np.float32)}
    tower = {name: tensor.read() for name, tensor in tensors.items()} | vision
    write_safetensors(folder / "model.safetensors", tower)
    checkpoint = open_checkpoint(folder)
    model = functional_model(checkpoint, Numerics())
    with pytest.raises(CheckpointError, match=r"vision_tower\.layers\.0\.weight"):
        load_weights(checkpoint, model)
    table = model.family.hf_weights(model.config)
    wanted = dataclasses.replace(table, ignored=(*table.ignored, r"vision_tower\..*"))
    model.family = dataclasses.replace(model.family, hf_weights=lambda config: wanted)
    assert len(load_weights(checkpoint, model)) == len(model.parameters)


# The hub


def test_hub_id_has_the_form_organisation_name():
    assert hub.is_hub_id("HuggingFaceTB/SmolLM2-135M")
    for source in ("demo", "a/b/c", "/a/b", "a/", "../a", "a b/c", "https://host/a"):
        assert not hub.is_hub_id(source)


def test_hub_download_excludes_pickles_and_keeps_the_name(model, monkeypatch):
    requested: dict[str, Any] = {}

    def snapshot_download(hub_id: str, **options: Any) -> str:
        requested.update(options, hub_id=hub_id)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.name == "org/name"
    assert requested["hub_id"] == "org/name"
    assert requested["allow_patterns"] == hub.ALLOW_PATTERNS and "*.bin" not in hub.ALLOW_PATTERNS


def test_unreachable_hub_is_refused_with_offline_alternatives(monkeypatch):
    def snapshot_download(hub_id: str, **options: Any) -> str:
        raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    error_text = refused("org/name")
    assert "org/name: there is no such local path" in error_text
    assert "ConnectionError: no route to host)" in error_text
    assert '"demo" work without the hub' in error_text


def test_local_directory_takes_precedence_over_a_hub_id(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    (model.parent / "org").symlink_to(model.parent)
    assert open_checkpoint(f"org/{model.name}").path == Path(f"org/{model.name}")
