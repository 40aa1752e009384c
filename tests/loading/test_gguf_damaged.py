"""Damaged GGUF files are refused with a specific error, in bounded time and memory."""

from __future__ import annotations

import os
import struct
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.loading import CheckpointError, open_checkpoint
from tests.support import gguf_files as files
from tests.support.gguf_files import refused

# Damaged files and what each error must say. Offsets in `tensor_entry` count from the data's start.
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
    "empty tensor": (files.header(1) + files.tensor_entry("w", (4, 0), F32, 0), "'w' is empty"),
    "huge tensor": (
        files.header(1) + files.tensor_entry("w", (2**62, 2**62), F32, 0) + bytes(64),
        "the file is truncated",
    ),
    "offset": (
        files.header(1) + files.tensor_entry("w", (4,), F32, 2**40) + bytes(64),
        "'w' ends at byte",
    ),
    "misaligned": (
        files.header(1) + files.tensor_entry("w", (4,), F32, 3) + bytes(64),
        "not a multiple of 32",
    ),
    "block": (
        files.header(1) + files.tensor_entry("w", (33,), Q4_0, 0) + bytes(64),
        "Q4_0's block of 32",
    ),
    "tensor type": (
        files.header(1) + files.tensor_entry("w", (4,), 999, 0) + bytes(64),
        "unknown type 999; convert the model to Q8_0",
    ),
    "tensor twice": (
        files.header(2) + files.tensor_entry("w", (4,), F32, 0) * 2 + bytes(64),
        "'w' occurs twice",
    ),
    "overlap": (
        files.header(2)
        + files.tensor_entry("v", (16,), F32, 0)
        + files.tensor_entry("w", (4,), F32, 32)
        + bytes(128),
        "'v' and 'w' overlap",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_header_is_refused_in_bounded_time_and_memory(damage, tmp_path):
    data, message = DAMAGED[damage]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    error_text = refused(path)
    assert message in error_text
    assert str(path) in error_text


def test_all_problems_of_the_tensor_directory_are_listed_in_one_error(tmp_path):
    lines = [files.tensor_entry(f"t{i}", (4,), 999, 0) for i in range(30)]
    lines.append(files.tensor_entry("far", (4,), F32, 2**20))
    (tmp_path / "a.gguf").write_bytes(files.header(len(lines)) + b"".join(lines) + bytes(64))
    error_text = refused(tmp_path / "a.gguf")
    assert "31 problems" in error_text
    assert "'t0'" in error_text
    assert "and 11 more" in error_text


def test_unsupported_gguf_types_are_refused_by_name_with_a_remedy(tmp_path):
    lines = [files.tensor_entry(name, (256,), IQ2_XXS, i * 96) for i, name in enumerate("ab")]
    (tmp_path / "a.gguf").write_bytes(files.header(2) + b"".join(lines) + bytes(512))
    error_text = refused(tmp_path / "a.gguf")
    for name in "ab":
        assert f"tensor '{name}' has type IQ2_XXS" in error_text
    assert "convert the model to Q8_0, Q6_K or F16" in error_text


def test_gguf_file_truncated_anywhere_is_refused(tmp_path):
    whole = files.write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, len(whole) - 32, 97), len(whole) - 32]:
        cut.write_bytes(whole[:size])
        refused(cut)


def test_reading_a_file_truncated_after_opening_raises(tmp_path):
    path = files.write_gguf(tmp_path / "a.gguf", {"w": np.zeros((64, 64), np.float32)})
    tensor = open_checkpoint(path).tensors["w"]
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="changed or cut while in use"):
        tensor.read()


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory) -> list[bytes]:
    """Write a file for each vocabulary, with unquantized and quantized tensors."""
    folder = tmp_path_factory.mktemp("valid")
    contents = []
    for kind in ("byte", "piece"):
        writer = files.new_writer(folder / f"{kind}.gguf")
        {"byte": files.add_byte_vocabulary, "piece": files.add_piece_vocabulary}[kind](writer)
        writer.add_tensor("norm", np.ones((2, 4), np.float32))
        blocks = np.arange(2 * 68, dtype=np.uint8).reshape(2, 68)
        writer.add_tensor("w", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
        files.finish(writer)
        contents.append((folder / f"{kind}.gguf").read_bytes())
    return contents


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_gguf_file_works_or_is_refused(data, valid_files, tmp_path_factory):
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
