"""The bytes that each token of a vocabulary decodes to.

Vocabularies write tokens in four ways: the byte alphabet of GPT-2 (a printable character for each
byte), SentencePiece (U+2581 for a space, `<0xE2>` for a byte), WordPiece (`##` continues a word),
and plain text. The decoder of a `tokenizer.json` says which, or the tokenizer model of a GGUF file.
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
    """Raised for a decoder that does not give each token a fixed string of bytes."""


class TokenDecoding(NamedTuple):
    """How a vocabulary's tokens are decoded to bytes.

    `to_first` decodes the first token of a text; None if it is no different. `strips_space` is
    whether the difference is that one leading space is removed.
    """

    to_bytes: Callable[[str], bytes]
    to_first: Callable[[str], bytes] | None = None
    strips_space: bool = False


class TokenTable(NamedTuple):
    """The bytes of each token by id.

    `data[i]` are the bytes of token i; `first[i]` are its bytes at the start of a text, if they
    differ.
    """

    data: tuple[bytes, ...]
    first: dict[int, bytes]
    strips_space: bool = False  # whether decoding removes a leading space from a text

    def with_plain(self, texts: Mapping[int, str]) -> TokenTable:
        """Return a table in which the tokens `texts` decode to their text unchanged."""
        data, first = list(self.data), dict(self.first)
        for index, text in texts.items():
            data[index] = text.encode("utf-8")
            first.pop(index, None)
            if self.strips_space and text.startswith(" "):
                first[index] = data[index][1:]
        return TokenTable(tuple(data), first, self.strips_space)


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map of characters to bytes: printable ones, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_level_decoding() -> TokenDecoding:
    """Decode each character to a byte; a token with other characters (an added one) is text."""
    alphabet = byte_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode("utf-8")

    return TokenDecoding(to_bytes)


def sentencepiece_decoding(strips_leading_space: bool) -> TokenDecoding:
    """Decode U+2581 to a space and `<0x..>` to a byte; the rest is text."""
    return _replacing_decoding(
        [(SPACE_SYMBOL, " ")], has_bytes=True, strips_space=strips_leading_space
    )


def wordpiece_decoding(prefix: str, cleans_up: bool) -> TokenDecoding:
    """Decode a token that begins with `prefix` as a word's continuation, others after a space.

    The first token of a text is written unchanged, even its `prefix`, as the `tokenizers` library
    does. `cleans_up` removes the space before some punctuation and English contractions.
    """

    def to_first(token: str) -> bytes:
        return (_clean_up(token) if cleans_up else token).encode("utf-8")

    def to_bytes(token: str) -> bytes:
        return to_first(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}")

    return TokenDecoding(to_bytes, to_first)


# The replacements that the WordPiece decoder of `tokenizers` makes in one token, in this order.
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


def token_decoding(decoder: decoders.Decoder | None) -> TokenDecoding:
    """Return the decoding that a decoder of `tokenizer.json` implies.

    Raises `UnsupportedDecoderError` if its tokens have no fixed bytes (CTC, BPEDecoder, ...).
    """
    if decoder is None:  # the library then joins tokens with a space
        return TokenDecoding(
            lambda token: f" {token}".encode(), lambda token: token.encode("utf-8")
        )
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return byte_level_decoding()
    if kinds == ["WordPiece"]:
        step = next(step for step in steps if step["type"] == "WordPiece")
        return wordpiece_decoding(step["prefix"], step["cleanup"])
    return _decoding_from_steps(steps)


def _decoding_from_steps(steps: list[dict[str, Any]]) -> TokenDecoding:
    """Combine replacements in each token with the removal of one leading space of the text."""
    replacements: list[tuple[str, str]] = []
    drops: int | None = None
    has_bytes = strips_space = is_fused = False
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
            strips_space = strips_space or step["start"] == 1
        else:
            raise UnsupportedDecoderError(f"decoder step {step} is not supported")
    return _replacing_decoding(
        replacements, has_bytes=has_bytes, strips_space=strips_space, drops=drops
    )


def _replacing_decoding(
    replacements: Sequence[tuple[str, str]],
    *,
    has_bytes: bool,
    strips_space: bool,
    drops: int | None = None,
) -> TokenDecoding:
    """Decode by replacements in turn; the replacement at index `drops` deletes in a first token.

    Metaspace works so: it removes every space of the first token. `strips_space` removes one.
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
        return data.removeprefix(b" ") if strips_space else data

    has_first = strips_space or drops is not None
    to_bytes = lambda token: replace(token, replacements)
    return TokenDecoding(to_bytes, to_first if has_first else None, strips_space)


def _strips_one_space(step: Mapping[str, Any]) -> bool:
    return step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0


def make_table(tokens: Sequence[str | None], decoding: TokenDecoding) -> TokenTable:
    """Return the table of `tokens` by id, with None for an unused id."""
    data = [b"" if token is None else decoding.to_bytes(token) for token in tokens]
    first: dict[int, bytes] = {}
    if decoding.to_first is not None:
        for index, token in enumerate(tokens):
            if token is not None and (start := decoding.to_first(token)) != data[index]:
                first[index] = start
    return TokenTable(tuple(data), first, decoding.strips_space)


def token_table(
    backend: tokenizers.Tokenizer, decoding: TokenDecoding, max_tokens: int
) -> TokenTable:
    """Return the bytes of every id of `backend`, added tokens included; unused ids have none.

    Raises `ValueError` for an id of `max_tokens` or more, since the largest id sets the table's
    length.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest >= max_tokens:
        raise ValueError(f"token id {largest:,} is not below the limit of {max_tokens:,}")
    tokens: list[str | None] = [None] * (largest + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    # An added token that is matched in normalized text decodes to its normalized form.
    for index in backend.get_added_tokens_decoder():
        tokens[index] = backend.id_to_token(index)
    return make_table(tokens, decoding)
