"""The bytes that each token of a vocabulary stands for.

Four spellings are in use: the byte alphabet of GPT-2 (a printable character for each byte),
SentencePiece's (U+2581 for a space, `<0xE2>` for a byte), WordPiece's (`##` continues a word), and
plain text. A `tokenizer.json` says which by its decoder, a GGUF file by its tokenizer model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders

SPACE_SYMBOL = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoderError(ValueError):
    """A decoder whose effect is not a fixed string of bytes for each token."""


class Spelling(NamedTuple):
    """The bytes of one token's text, and those it has as the first token of a text.

    `to_first` is `None` where there is no difference; `strips` if it is one leading space.
    """

    to_bytes: Callable[[str], bytes]
    to_first: Callable[[str], bytes] | None = None
    strips: bool = False


class TokenTable(NamedTuple):
    """`data[i]` are the bytes of token i, `first[i]` those at a text's start where they differ."""

    data: tuple[bytes, ...]
    first: dict[int, bytes]
    strips: bool = False  # whether decoding takes a space off a text's start

    def with_plain(self, texts: Mapping[int, str]) -> TokenTable:
        """The table with the tokens `texts` written as they are, in whatever spelling it has."""
        data, first = list(self.data), dict(self.first)
        for index, text in texts.items():
            data[index] = text.encode("utf-8")
            first.pop(index, None)
            if self.strips and text.startswith(" "):
                first[index] = data[index][1:]
        return TokenTable(tuple(data), first, self.strips)


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

    return Spelling(to_bytes)


def sentencepiece_spelling(strips_leading_space: bool) -> Spelling:
    """U+2581 is a space, `<0x..>` a byte, the rest plain text."""
    return _chain_spelling([(SPACE_SYMBOL, " ")], has_bytes=True, strips=strips_leading_space)


def wordpiece_spelling(prefix: str, cleans_up: bool) -> Spelling:
    """A token that begins with `prefix` continues a word; any other has a space before it.

    At the start of a text there is neither: even `prefix` is written out, as in the reference.
    `cleans_up` drops the space before some punctuation and English contractions.
    """

    def to_first(token: str) -> bytes:
        return (_clean_up(token) if cleans_up else token).encode("utf-8")

    def to_bytes(token: str) -> bytes:
        return to_first(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}")

    return Spelling(to_bytes, to_first)


# What the WordPiece decoder of `tokenizers` replaces within one token, in this order.
_CLEAN_UP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((f" {ending}", ending) for ending in ("'s", "'ve", "'re")),
)


def _clean_up(text: str) -> str:
    for old, new in _CLEAN_UP:
        text = text.replace(old, new)
    return text


def spelling_of(decoder: decoders.Decoder | None) -> Spelling:
    """The spelling that a `tokenizer.json` decoder implies.

    `UnsupportedDecoderError` for one whose tokens have no fixed bytes (CTC, BPEDecoder, ...).
    """
    if decoder is None:  # the library then joins tokens by a space
        return Spelling(lambda token: f" {token}".encode(), lambda token: token.encode("utf-8"))
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return byte_level_spelling()
    if kinds == ["WordPiece"]:
        step = next(step for step in steps if step["type"] == "WordPiece")
        return wordpiece_spelling(step["prefix"], step["cleanup"])
    return _spelling_of_steps(steps)


def _spelling_of_steps(steps: list[dict[str, Any]]) -> Spelling:
    """Replacements in each token, then at most one leading space off the fused text."""
    replacements: list[tuple[str, str]] = []
    drops: int | None = None
    has_bytes = strips = is_fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not is_fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and not is_fused and drops is None:
            if step["prepend_scheme"] != "never":
                drops = len(replacements)
            replacements.append((step["replacement"], " "))
        elif kind == "ByteFallback" and not is_fused:
            has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and _strips_one_space(step):
            strips = strips or step["start"] == 1
        else:
            raise UnsupportedDecoderError(f"decoder step {step} is not supported")
    return _chain_spelling(replacements, has_bytes=has_bytes, strips=strips, drops=drops)


def _chain_spelling(
    replacements: Sequence[tuple[str, str]],
    *,
    has_bytes: bool,
    strips: bool,
    drops: int | None = None,
) -> Spelling:
    """Replacements in turn; in the first token, number `drops` removes what it replaces.

    That is Metaspace's way, which leaves none of the first token's spaces; `strips` takes one.
    """

    def replace(token: str, steps: Sequence[tuple[str, str]]) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        if match is not None:
            return bytes([int(match[1], 16)])
        for old, new in steps:
            token = token.replace(old, new)
        return token.encode("utf-8")

    at_start = [(old, "" if i == drops else new) for i, (old, new) in enumerate(replacements)]

    def to_first(token: str) -> bytes:
        data = replace(token, at_start)
        return data.removeprefix(b" ") if strips else data

    has_first = strips or drops is not None
    to_bytes = lambda token: replace(token, replacements)
    return Spelling(to_bytes, to_first if has_first else None, strips)


def _strips_one_space(step: Mapping[str, Any]) -> bool:
    return step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0


def table_of(tokens: Sequence[str | None], spelling: Spelling) -> TokenTable:
    """The table of `tokens` by id, `None` for an id that is not in use."""
    data = [b"" if token is None else spelling.to_bytes(token) for token in tokens]
    first: dict[int, bytes] = {}
    if spelling.to_first is not None:
        for index, token in enumerate(tokens):
            if token is not None and (start := spelling.to_first(token)) != data[index]:
                first[index] = start
    return TokenTable(tuple(data), first, spelling.strips)


def token_table(backend: tokenizers.Tokenizer, spelling: Spelling, max_tokens: int) -> TokenTable:
    """The bytes of every id of `backend`, added tokens included, empty where an id is unused.

    `ValueError` for an id of `max_tokens` or more: the table is as long as the largest id.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest >= max_tokens:
        raise ValueError(f"token id {largest:,} is not below the limit of {max_tokens:,}")
    tokens: list[str | None] = [None] * (largest + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    # An added token that is matched in normalized text is shown in its normalized spelling.
    for index in backend.get_added_tokens_decoder():
        tokens[index] = backend.id_to_token(index)
    return table_of(tokens, spelling)
