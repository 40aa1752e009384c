"""GGUF files: tensors, metadata and split models are read; invalid files are refused."""

from __future__ import annotations

import os
import re
import shutil
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from jaxinfer.loading import CheckpointError, gguf, open_checkpoint
from jaxinfer.loading.gguf import QUANTIZED_TYPES
from jaxinfer.loading.gguf_header import read_header
from tests.support import gguf_files as files
from tests.support.gguf_files import refused

QUANTIZED = sorted(kind.name for kind in QUANTIZED_TYPES)


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(kind.value)
    return generator.integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensor_equals_the_gguf_packages_dequantization(name, tmp_path, monkeypatch):
    # Three chunks, the last one partial.
    monkeypatch.setattr(gguf, "CHUNK_ELEMENTS", 1024)
    kind = GGMLQuantizationType[name]
    data = random_blocks(kind, 5, 512)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(data, kind)
    tensor = open_checkpoint(files.write_raw(tmp_path / "a.gguf", "w", data, kind)).tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (name, (5, 512), data.nbytes)
    values = tensor.read()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantized_gguf_tensor_is_close_to_the_original(name, tmp_path):
    kind = GGMLQuantizationType[name]
    weights = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    path = files.write_raw(tmp_path / "a.gguf", "w", quants.quantize(weights, kind), kind)
    error = np.abs(open_checkpoint(path).tensors["w"].read() - weights).max()
    assert error < np.abs(weights).max() * 2.0 ** -(int(name[1]) - 1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("F32", np.float32),
        ("F16", np.float16),
        ("F64", np.float64),
        ("I8", np.int8),
        ("I16", np.int16),
        ("I32", np.int32),
        ("I64", np.int64),
    ],
)
def test_unquantized_tensor_keeps_its_dtype_and_row_major_shape(name, dtype, tmp_path):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    tensor = open_checkpoint(files.write_gguf(tmp_path / "a.gguf", {"w": values})).tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (name, (2, 3, 4), values.nbytes)
    assert tensor.read().dtype == dtype
    np.testing.assert_array_equal(tensor.read(), values)


def test_bfloat16_stays_bfloat16(tmp_path):
    values = np.linspace(-3, 3, 64).reshape(4, 16).astype(ml_dtypes.bfloat16)
    path = tmp_path / "a.gguf"
    files.write_raw(path, "w", values.view(np.uint8), GGMLQuantizationType.BF16)
    read = open_checkpoint(path).tensors["w"].read()
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, values)


def test_every_gguf_value_type_is_read(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf", "näme")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_array("texts", ["a", "", "é"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    files.finish(writer)
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert checkpoint.name == "näme"
    assert checkpoint.format == "gguf"
    expected = {"u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000}
    expected |= {"i32": -2_000_000_000, "u64": 2**63, "i64": -(2**62), "f32": 0.5, "f64": 1e300}
    expected |= {"yes": True, "texts": ("a", "", "é"), "numbers": (1, 2, 3)}
    expected |= {"flags": (True, False)}
    assert {key: checkpoint.metadata[key] for key in expected} == expected


def test_long_numeric_metadata_is_an_array(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    writer.add_array("numbers", list(range(70_000)))
    files.finish(writer)
    numbers = open_checkpoint(tmp_path / "a.gguf").metadata["numbers"]
    np.testing.assert_array_equal(numbers, np.arange(70_000))


def test_vocabulary_arrays_are_not_in_the_metadata(tmp_path):
    metadata = open_checkpoint(files.write_gguf(tmp_path / "a.gguf")).metadata
    assert "tokenizer.ggml.model" in metadata
    assert not metadata.keys() & {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"}


def test_gguf_generation_defaults_are_read(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    files.add_byte_vocabulary(writer, eot_token_id=1, eom_token_id=0)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    files.finish(writer)
    defaults = open_checkpoint(tmp_path / "a.gguf").generation
    assert (defaults.eos_token_ids, defaults.bos_token_id) == ((0, 1), 1)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.5, 40, None)


def test_gguf_generation_default_of_the_wrong_type_is_refused(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    writer.add_string("general.sampling.temp", "hot")
    files.finish(writer)
    assert "general.sampling.temp is 'hot'" in refused(tmp_path / "a.gguf")


def test_quantized_read_uses_little_more_memory_than_its_result(tmp_path):
    kind = GGMLQuantizationType.Q4_K
    path = files.write_raw(tmp_path / "a.gguf", "w", random_blocks(kind, 2048, 2048), kind)
    tensor = open_checkpoint(path).tensors["w"]
    tracemalloc.start()
    try:
        values = tensor.read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes * 1.25


def test_demo_model_opens_fast():
    started = time.process_time()  # not wall time, because other processes may be busy
    checkpoint = open_checkpoint("demo")
    assert time.process_time() - started < 1.5
    assert len(checkpoint.tensors) == 272
    assert checkpoint.tensors["token_embd.weight"].shape == (49152, 576)
    assert checkpoint.tensors["token_embd.weight"].dtype == "Q8_0"
    assert checkpoint.tensors["blk.0.attn_k.weight"].shape == (192, 576)
    assert checkpoint.metadata["llama.block_count"] == 30
    assert checkpoint.generation.eos_token_ids == (2, 0)


def write_shards(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for index, path in enumerate(paths):
        writer = files.new_writer(path, "split model")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_tensor(f"w{index}", np.full((2, 2), index, np.float32))
        files.finish(writer)
    return paths


def test_any_shard_or_its_folder_opens_the_split_model(tmp_path):
    paths = write_shards(tmp_path, 3)
    for source in (*paths, tmp_path):
        checkpoint = open_checkpoint(source)
        assert checkpoint.path == paths[0]
        assert {n: t.read()[0, 0] for n, t in checkpoint.tensors.items()} == {
            "w0": 0,
            "w1": 1,
            "w2": 2,
        }


def test_all_missing_shards_are_named(tmp_path):
    paths = write_shards(tmp_path, 4)
    paths[1].unlink()
    paths[3].unlink()
    error_text = refused(paths[0])
    assert paths[1].name in error_text
    assert paths[3].name in error_text


@pytest.mark.parametrize("count", ["00000", "01001"])
def test_shard_count_out_of_range_is_refused(count, tmp_path):
    path = files.write_gguf(tmp_path / f"m-00001-of-{count}.gguf")
    assert f"claims {int(count):,} shards; 1 to 1,000 are allowed" in refused(path)


def test_renamed_shard_is_refused(tmp_path):
    shutil.copy(write_shards(tmp_path, 2)[0], tmp_path / "renamed.gguf")
    assert "split.count" in refused(tmp_path / "renamed.gguf")


def test_tensor_in_two_gguf_shards_is_refused(tmp_path):
    paths = write_shards(tmp_path, 2)
    shutil.copy(paths[0], paths[1])
    assert "'w0' occurs in two shards" in refused(paths[0])


def test_invalid_sources_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.gguf")
    for source, message in (
        ("", "pass a path"),
        (tmp_path / "missing.gguf", "is not a file, a directory or a hub id"),
        (tmp_path / "model.bin", "pickled weights"),
        (tmp_path / "model.safetensors", f"pass its directory {tmp_path}"),
        (tmp_path / "notes.txt", "not a .gguf file"),
        (tmp_path / "pipe.gguf", "neither a file nor a directory"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            open_checkpoint(source)


def test_directory_with_several_gguf_models_is_refused(tmp_path):
    files.write_gguf(tmp_path / "a.gguf")
    assert open_checkpoint(str(tmp_path)).path == tmp_path / "a.gguf"
    files.write_gguf(tmp_path / "b.gguf")
    error_text = refused(tmp_path)
    assert "a.gguf" in error_text
    assert "b.gguf" in error_text
    # A directory with safetensors files is not opened as GGUF.
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "model.safetensors" in refused(tmp_path)


def test_gguf_header_equals_the_gguf_packages_reader(tmp_path):
    from gguf import GGUFReader

    path = tmp_path / "a.gguf"
    files.write_gguf(path, {f"t{i}": np.full((i + 1, 32), i, np.float32) for i in range(4)})
    theirs = {t.name: (t.data_offset, t.n_bytes) for t in GGUFReader(path).tensors}
    assert {t.name: (t.offset, t.nbytes) for t in read_header(path).tensors} == theirs
