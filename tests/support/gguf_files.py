"""Small GGUF files and tokenizers for tests, and the demo model's tokenizer.

Files are written with the `gguf` package's writer, so that the reader under test is compared with
another implementation of the format.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import TokenType

from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.tokenizers.token_bytes import byte_alphabet
from jaxinfer.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# A byte-level vocabulary: two control tokens, the alphabet, merged tokens, a user-defined one.
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld")
BYTE_TOKENS = (
    "<|end|>",
    "<|begin|>",
    *byte_alphabet(),
    *(merge.replace(" ", "") for merge in MERGES),
    "<|tool é|>",
)
BYTE_TYPES = (
    TokenType.CONTROL,
    TokenType.CONTROL,
    *[TokenType.NORMAL] * (256 + len(MERGES)),
    TokenType.USER_DEFINED,
)

# A SentencePiece vocabulary: unknown, BOS, EOS, 256 bytes, pieces with scores, a user-defined one.
PIECES = (
    *("▁", "h", "e", "l", "o", "w", "r", "d", "é", "世"),
    *("he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁"),
)
PIECE_TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES, "<tool>")
PIECE_TYPES = (
    TokenType.UNKNOWN,
    TokenType.CONTROL,
    TokenType.CONTROL,
    *[TokenType.BYTE] * 256,
    *[TokenType.NORMAL] * len(PIECES),
    TokenType.USER_DEFINED,
)
PIECE_SCORES = (
    *[0.0] * 259,
    *[-100.0] * 10,
    *(-float(rank) for rank in range(1, len(PIECES) - 9)),
    0.0,
)


def add_vocabulary(
    writer: GGUFWriter,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int] | None = None,
    *,
    pre: str | None = None,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a vocabulary; `extra` has further `tokenizer.ggml.*` keys: ints, bools, strings."""
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if types is not None:
        writer.add_token_types(types)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in (extra or {}).items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)


def add_byte_vocabulary(writer: GGUFWriter, pre: str = "gpt-2", **extra: Any) -> None:
    extra = {"eos_token_id": 0, "bos_token_id": 1, **extra}
    add_vocabulary(writer, "gpt2", BYTE_TOKENS, BYTE_TYPES, pre=pre, merges=MERGES, extra=extra)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_piece_vocabulary(writer: GGUFWriter, **extra: Any) -> None:
    add_vocabulary(writer, "llama", PIECE_TOKENS, PIECE_TYPES, scores=PIECE_SCORES, extra=extra)


def new_writer(path: Path, name: str = "small") -> GGUFWriter:
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    return writer


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """Write unquantized tensors (one float32 by default) and the byte-level vocabulary."""
    writer = new_writer(path)
    add_byte_vocabulary(writer)
    if tensors is None:
        tensors = {"output_norm.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def write_raw(path: Path, name: str, data: np.ndarray, kind: GGMLQuantizationType) -> Path:
    """Write one tensor, given as rows of stored bytes (uint8), and no vocabulary."""
    writer = new_writer(path)
    writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return path


def header(num_tensors: int = 0, num_key_values: int = 0, version: int = 3) -> bytes:
    """Return the fixed first 24 bytes of a file."""
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_key_values)


def text(value: str | bytes) -> bytes:
    """Encode a string as GGUF stores it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor_entry(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """Encode an entry of the tensor directory; `dims` are in file order, fastest first."""
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


@cache
def demo_tokenizer() -> Tokenizer:
    """Build SmolLM2's tokenizer from the demo model's file."""
    return open_checkpoint("demo").tokenizer()


def small_tokenizer(folder: Path, kind: str, **extra: Any) -> Tokenizer:
    """Write a file with the "byte" or "piece" vocabulary to `folder`; return its tokenizer."""
    writer = new_writer(folder / f"{kind}.gguf")
    {"byte": add_byte_vocabulary, "piece": add_piece_vocabulary}[kind](writer, **extra)
    finish(writer)
    return open_checkpoint(folder / f"{kind}.gguf").tokenizer()


def refused(path: Path) -> str:
    """Return the error of opening `path`, which must take little time and memory."""
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
