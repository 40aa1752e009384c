"""GGUF files: what is written is read back, and what is damaged is refused, cheaply."""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
import tracemalloc
from pathlib import Path

import gguf_files as files
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.loading import CheckpointError, gguf, open_checkpoint
from jaxinfer.loading.gguf import QUANTIZED_TYPES
from jaxinfer.loading.gguf_header import read_header

QUANTIZED = sorted(kind.name for kind in QUANTIZED_TYPES)


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(kind.value)
    return generator.integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)


def refused(path: Path) -> str:
    """The message with which opening `path` is refused, in little time and memory."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < 5
    assert peak < 8 * 2**20
    return str(caught.value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_tensor_reads_as_the_package_dequantizes_it(name, tmp_path, monkeypatch):
    # Three chunks, the last one cut short.
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
def test_quantized_weights_come_back_near_the_originals(name, tmp_path):
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
def test_a_plain_tensor_keeps_its_dtype_and_its_row_major_shape(name, dtype, tmp_path):
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


def test_every_kind_of_value_is_read(tmp_path):
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


def test_a_long_numeric_array_stays_an_array(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    writer.add_array("numbers", list(range(70_000)))
    files.finish(writer)
    numbers = open_checkpoint(tmp_path / "a.gguf").metadata["numbers"]
    np.testing.assert_array_equal(numbers, np.arange(70_000))


def test_the_vocabulary_arrays_are_not_part_of_the_metadata(tmp_path):
    metadata = open_checkpoint(files.write_gguf(tmp_path / "a.gguf")).metadata
    assert "tokenizer.ggml.model" in metadata
    assert not metadata.keys() & {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"}


def test_generation_defaults_come_from_the_file(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    files.add_byte_vocabulary(writer, eot_token_id=1, eom_token_id=0, padding_token_id=2)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    files.finish(writer)
    defaults = open_checkpoint(tmp_path / "a.gguf").generation
    assert (defaults.eos_token_ids, defaults.bos_token_id, defaults.pad_token_id) == ((0, 1), 1, 2)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.5, 40, None)


def test_a_generation_default_of_the_wrong_type_is_refused(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    writer.add_string("general.sampling.temp", "hot")
    files.finish(writer)
    assert "general.sampling.temp is 'hot'" in refused(tmp_path / "a.gguf")


def test_reading_a_quantized_tensor_needs_little_more_than_its_result(tmp_path):
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


def test_the_demo_model_opens_fast():
    started = time.perf_counter()
    checkpoint = open_checkpoint("demo")
    assert time.perf_counter() - started < 1.5
    assert len(checkpoint.tensors) == 272
    assert checkpoint.tensors["token_embd.weight"].shape == (49152, 576)
    assert checkpoint.tensors["token_embd.weight"].dtype == "Q8_0"
    assert checkpoint.tensors["blk.0.attn_k.weight"].shape == (192, 576)
    assert checkpoint.metadata["llama.block_count"] == 30
    assert checkpoint.generation.eos_token_ids == (2,)


# Each damage and what the message must name. Offsets in `tensor_line` count from the data's start.
F32, Q4_0, IQ2_XXS = 0, 2, 16
DAMAGED = {
    "empty": (b"", "not a GGUF file"),
    "magic": (b"GGML" + bytes(20), "begins with b'GGML'"),
    "only magic": (b"GGUF", "truncated"),
    "version 1": (files.header(version=1), "version 1 is not supported"),
    "version 9": (files.header(version=9), "version 9 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (files.header(2**60), "claims 1,152,921,504,606,846,976 tensors"),
    "key-value count": (files.header(0, 2**60), "key-values, more than the limit"),
    "fewer key-values": (files.header(0, 5), "truncated"),
    "string length": (files.header(0, 1) + struct.pack("<Q", 2**60), "more than the limit"),
    "value length": (
        files.header(0, 1) + files.text("k") + struct.pack("<IQ", 8, 2**60),
        "'k' needs 1,152,921,504,606,846,976 bytes",
    ),
    "array length": (
        files.header(0, 1) + files.text("k") + struct.pack("<IIQ", 9, 4, 2**60),
        "'k' (1,152,921,504,606,846,976 entries)",
    ),
    "string array length": (
        files.header(0, 1) + files.text("k") + struct.pack("<IIQ", 9, 8, 2**60),
        "'k' claims 1,152,921,504,606,846,976 strings",
    ),
    "string array beyond the file": (
        files.header(0, 1) + files.text("k") + struct.pack("<IIQ", 9, 8, 1000),
        "'k' claims 1,000 strings",
    ),
    "string in array": (
        files.header(0, 1) + files.text("k") + struct.pack("<IIQQ", 9, 8, 1, 2**60),
        "string 0 of 'k'",
    ),
    "nested array": (
        files.header(0, 1) + files.text("k") + struct.pack("<IIQ", 9, 9, 1),
        "nested arrays are not supported",
    ),
    "value type": (
        files.header(0, 1) + files.text("k") + struct.pack("<IQ", 77, 0),
        "unknown value type 77",
    ),
    "non-UTF-8 key": (
        files.header(0, 1) + files.text(b"k\xff") + struct.pack("<IB", 0, 1),
        "key 0 is not UTF-8",
    ),
    "non-UTF-8 value": (
        files.header(0, 1) + files.text("k") + struct.pack("<I", 8) + files.text(b"\xc3("),
        "'k' is not UTF-8",
    ),
    "key twice": (
        files.header(0, 2) + (files.text("k") + struct.pack("<IB", 0, 1)) * 2,
        "'k' occurs twice",
    ),
    "alignment": (
        files.header(0, 1) + files.text("general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment is 0",
    ),
    "rank": (files.header(1) + files.text("w") + struct.pack("<I", 2**31), "2147483648 dimensions"),
    "empty tensor": (files.header(1) + files.tensor_line("w", (4, 0), F32, 0), "'w' is empty"),
    "huge tensor": (
        files.header(1) + files.tensor_line("w", (2**62, 2**62), F32, 0) + bytes(64),
        "the file is truncated",
    ),
    "offset": (
        files.header(1) + files.tensor_line("w", (4,), F32, 2**40) + bytes(64),
        "'w' ends at byte",
    ),
    "misaligned": (
        files.header(1) + files.tensor_line("w", (4,), F32, 3) + bytes(64),
        "not a multiple of 32",
    ),
    "block": (
        files.header(1) + files.tensor_line("w", (33,), Q4_0, 0) + bytes(64),
        "Q4_0's block of 32",
    ),
    "tensor type": (
        files.header(1) + files.tensor_line("w", (4,), 999, 0) + bytes(64),
        "unknown type 999; convert the model to Q8_0",
    ),
    "tensor twice": (
        files.header(2) + files.tensor_line("w", (4,), F32, 0) * 2 + bytes(64),
        "'w' occurs twice",
    ),
    "overlap": (
        files.header(2)
        + files.tensor_line("v", (16,), F32, 0)
        + files.tensor_line("w", (4,), F32, 32)
        + bytes(128),
        "'v' and 'w' overlap",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header_is_refused_by_name_in_bounded_time_and_memory(damage, tmp_path):
    data, message = DAMAGED[damage]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    said = refused(path)
    assert message in said
    assert str(path) in said


def test_everything_wrong_in_the_directory_is_reported_at_once(tmp_path):
    lines = [files.tensor_line(f"t{i}", (4,), 999, 0) for i in range(30)]
    lines.append(files.tensor_line("far", (4,), F32, 2**20))
    (tmp_path / "a.gguf").write_bytes(files.header(len(lines)) + b"".join(lines) + bytes(64))
    said = refused(tmp_path / "a.gguf")
    assert "31 problems" in said
    assert "'t0'" in said
    assert "and 11 more" in said


def test_unsupported_quantizations_are_refused_naming_tensor_type_and_way_out(tmp_path):
    lines = [files.tensor_line(name, (256,), IQ2_XXS, i * 96) for i, name in enumerate("ab")]
    (tmp_path / "a.gguf").write_bytes(files.header(2) + b"".join(lines) + bytes(512))
    said = refused(tmp_path / "a.gguf")
    for name in "ab":
        assert f"tensor '{name}' has type IQ2_XXS" in said
    assert "convert the model to Q8_0, Q6_K or F16" in said


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path):
    whole = files.write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, len(whole) - 32, 97), len(whole) - 32]:
        cut.write_bytes(whole[:size])
        refused(cut)


def test_a_file_cut_after_opening_is_an_error_when_read(tmp_path):
    path = files.write_gguf(tmp_path / "a.gguf", {"w": np.zeros((64, 64), np.float32)})
    tensor = open_checkpoint(path).tensors["w"]
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="changed or cut while in use"):
        tensor.read()


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory) -> list[bytes]:
    """A file with each vocabulary, with plain and quantized tensors."""
    folder = tmp_path_factory.mktemp("valid")
    contents = []
    for kind in ("byte", "piece"):
        writer = files.new_writer(folder / f"{kind}.gguf")
        {"byte": files.add_byte_vocabulary, "piece": files.add_piece_vocabulary}[kind](writer)
        writer.add_tensor("norm", np.ones((2, 4), np.float32))
        q8 = GGMLQuantizationType.Q8_0
        writer.add_tensor("w", random_blocks(q8, 2, 64), raw_dtype=q8)
        files.finish(writer)
        contents.append((folder / f"{kind}.gguf").read_bytes())
    return contents


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_mutated_file_either_works_or_is_refused(data, valid_files, tmp_path_factory):
    content = bytearray(data.draw(st.sampled_from(valid_files)))
    position = st.one_of(st.integers(0, 400), st.integers(0, len(content) - 1))
    for where in data.draw(st.lists(position, max_size=4)):
        content[where] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 0x7F, 0x80, 0xFF]))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(content[:cut])
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for tensor in checkpoint.tensors.values():
            assert tensor.read().shape == tensor.shape
        tokenizer = checkpoint.tokenizer()
        tokenizer.decode(tokenizer.encode("hello world"))
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * 2**20


def write_shards(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for index, path in enumerate(paths):
        writer = files.new_writer(path, "split model")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_tensor(f"w{index}", np.full((2, 2), index, np.float32))
        files.finish(writer)
    return paths


def test_any_shard_of_a_split_model_or_its_folder_opens_the_whole(tmp_path):
    paths = write_shards(tmp_path, 3)
    for source in (*paths, tmp_path):
        checkpoint = open_checkpoint(source)
        assert checkpoint.path == paths[0]
        assert {n: t.read()[0, 0] for n, t in checkpoint.tensors.items()} == {
            "w0": 0,
            "w1": 1,
            "w2": 2,
        }


def test_missing_shards_are_all_named(tmp_path):
    paths = write_shards(tmp_path, 4)
    paths[1].unlink()
    paths[3].unlink()
    said = refused(paths[0])
    assert paths[1].name in said
    assert paths[3].name in said


def test_a_renamed_shard_is_no_whole_model(tmp_path):
    shutil.copy(write_shards(tmp_path, 2)[0], tmp_path / "renamed.gguf")
    assert "split.count" in refused(tmp_path / "renamed.gguf")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    paths = write_shards(tmp_path, 2)
    shutil.copy(paths[0], paths[1])
    assert "'w0' occurs in two shards" in refused(paths[0])


def test_sources_that_are_no_checkpoint_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.gguf")
    for source, message in (
        ("", "pass a path"),
        (tmp_path / "missing.gguf", "no such file"),
        (tmp_path / "model.bin", "pickled weights"),
        (tmp_path / "model.safetensors", f"pass the directory {tmp_path}"),
        (tmp_path / "notes.txt", "not a .gguf file"),
        (tmp_path / "pipe.gguf", "neither a file nor a directory"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            open_checkpoint(source)


def test_a_folder_opens_only_if_it_holds_one_gguf_model(tmp_path):
    files.write_gguf(tmp_path / "a.gguf")
    assert open_checkpoint(str(tmp_path)).path == tmp_path / "a.gguf"
    files.write_gguf(tmp_path / "b.gguf")
    said = refused(tmp_path)
    assert "a.gguf" in said
    assert "b.gguf" in said


def test_the_header_walk_agrees_with_the_packages_own_reader(tmp_path):
    from gguf import GGUFReader

    path = tmp_path / "a.gguf"
    files.write_gguf(path, {f"t{i}": np.full((i + 1, 32), i, np.float32) for i in range(4)})
    theirs = {t.name: (t.data_offset, t.n_bytes) for t in GGUFReader(path).tensors}
    assert {t.name: (t.offset, t.nbytes) for t in read_header(path).tensors} == theirs
