"""The bytes that each token of a vocabulary stands for.

Three spellings are in use: the byte alphabet of GPT-2 (a printable character for each byte),
SentencePiece's (U+2581 for a space, `<0xE2>` for a byte), and plain text. A `tokenizer.json` says
which by its decoder, a GGUF file by its tokenizer model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders

SPACE_SYMBOL = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoderError(ValueError):
    """A decoder whose effect is not a fixed string of bytes for each token."""


class Spelling(NamedTuple):
    """`to_bytes` of one token's text, and whether decoding strips the text's leading space."""

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_level_spelling() -> Spelling:
    """Every character is a byte; a token with other characters (an added one) is plain text."""
    alphabet = byte_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode("utf-8")

    return Spelling(to_bytes, strips_leading_space=False)


def sentencepiece_spelling(strips_leading_space: bool) -> Spelling:
    """U+2581 is a space, `<0x..>` a byte, the rest plain text."""

    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_SYMBOL, " ").encode("utf-8")

    return Spelling(to_bytes, strips_leading_space)


def spelling_of(decoder: decoders.Decoder | None) -> Spelling:
    """The spelling that a `tokenizer.json` decoder implies.

    `UnsupportedDecoderError` for one that looks at neighbouring tokens (WordPiece, CTC, ...).
    """
    if decoder is None:  # the library then joins tokens by a space
        return Spelling(lambda token: f" {token}".encode(), strips_leading_space=True)
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return byte_level_spelling()
    return _spelling_of_steps(steps)


def _spelling_of_steps(steps: list[dict[str, Any]]) -> Spelling:
    """Replacements in each token, then at most one leading space off the fused text."""
    replacements: list[tuple[str, str]] = []
    has_bytes = strips = is_fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not is_fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and not is_fused:
            replacements.append((step["replacement"], " "))
            strips = strips or step["prepend_scheme"] != "never"
        elif kind == "ByteFallback" and not is_fused:
            has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and _strips_one_space(step):
            strips = strips or step["start"] == 1
        else:
            raise UnsupportedDecoderError(f"decoder step {step} is not supported")

    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        if match is not None:
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")

    return Spelling(to_bytes, strips)


def _strips_one_space(step: Mapping[str, Any]) -> bool:
    return step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0


def token_table(
    backend: tokenizers.Tokenizer, spelling: Spelling, max_tokens: int
) -> tuple[bytes, ...]:
    """The bytes of every id of `backend`, added tokens included, empty where an id is unused.

    `ValueError` for an id of `max_tokens` or more: the table is as long as the largest id.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest >= max_tokens:
        raise ValueError(f"token id {largest:,} is not below the limit of {max_tokens:,}")
    table = [b""] * (largest + 1)
    for token, index in vocabulary.items():
        table[index] = spelling.to_bytes(token)
    return tuple(table)
