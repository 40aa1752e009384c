"""Encode with the `sentencepiece` library, for `tokenizer.model` files and GGUF vocabularies.

The library normalizes and segments as in training; a tokenizer rebuilt from the same pieces differs
in normalization, in the precision of scores (single) and in how ties are resolved. Before that, the
`tokenizers` library splits the text at added tokens, with all its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from sentencepiece import SentencePieceProcessor

# The generated protobuf module has no source and defines its classes at run time.
from sentencepiece.sentencepiece_model_pb2 import (  # pyright: ignore[reportMissingModuleSource]
    ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
)
from tokenizers import models

from jaxinfer.loading.checkpoint import CheckpointError

# Piece types and model types of the format; GGUF numbers its token types in the same way.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


class Encoded(NamedTuple):
    """The part of a `tokenizers.Encoding` that is used."""

    ids: list[int]


class SentencePieceBackend:
    """A SentencePiece model with added tokens; `tokens[i]` is the text of id i.

    `added` are the tokens that are matched in a text before it is normalized. The parts between
    them are encoded separately: each one with the model's space prefix if `prefixes_every_part`,
    otherwise only a part at the start of the text. Raises `CheckpointError` for a model that the
    library refuses.
    """

    def __init__(
        self,
        path: Path,
        model: Any,
        tokens: Sequence[str | None],
        added: Mapping[int, tokenizers.AddedToken],
        *,
        prefixes_every_part: bool = True,
    ) -> None:
        self._path = path
        self._model: Any = None if prefixes_every_part else model
        self._tokens = tokens
        self._ids = {token: i for i, token in enumerate(tokens) if token is not None}
        self._processor = _load(path, model)
        self._prefixes_every_part = prefixes_every_part
        # This model encodes each part between added tokens as one unknown word.
        self._outside = len(tokens)
        vocabulary = {token.content: i for i, token in added.items()}
        splitter = models.WordLevel({**vocabulary, "": self._outside}, unk_token="")
        self._splitter = tokenizers.Tokenizer(splitter) if added else None
        if self._splitter is not None:
            self._splitter.add_tokens(list(added.values()))

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Encoded:
        """Encode `text`, without any tokens before or after it."""
        if self._splitter is None:
            return Encoded(self._processor.encode(text))
        ids: list[int] = []
        parts = self._splitter.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(parts.ids, parts.offsets, strict=True):
            if token_id != self._outside:
                ids.append(token_id)
            elif start == 0 or self._prefixes_every_part:
                ids += self._processor.encode(text[start:end])
            else:
                ids += self._without_prefix.encode(text[start:end])
        return Encoded(ids)

    @cached_property
    def _without_prefix(self) -> SentencePieceProcessor:
        model = self._model
        model.normalizer_spec.add_dummy_prefix = False
        return _load(self._path, model)

    def token_to_id(self, token: str, /) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token_id: int, /) -> str | None:
        return self._tokens[token_id] if token_id < len(self._tokens) else None


def _load(path: Path, model: Any) -> SentencePieceProcessor:
    try:
        return SentencePieceProcessor(model_proto=model.SerializeToString())
    # The library raises RuntimeError, ValueError and other types, depending on the damage.
    except Exception as error:
        raise CheckpointError(f"{path}: not a SentencePiece vocabulary ({error})") from error


def read_model(path: Path) -> Any:
    """Read the `ModelProto` of a `tokenizer.model` file.

    Raises `CheckpointError` for another kind of file, and for settings whose text cannot be
    streamed.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    model = ModelProto()
    try:
        model.ParseFromString(raw)
    # protobuf's DecodeError, whose class differs between implementations.
    except Exception as error:
        raise _no_model(path, str(error)) from error
    if not model.pieces:
        raise _no_model(path, "it has no pieces")
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise CheckpointError(
            f"{path}: its pieces have the space at their end (treat_whitespace_as_suffix), which "
            "is not supported; use a tokenizer.json"
        )
    if model.denormalizer_spec.precompiled_charsmap:
        raise CheckpointError(
            f"{path}: it rewrites decoded text (denormalizer_spec), which cannot be streamed; "
            "use a tokenizer.json"
        )
    return model


def _no_model(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not a SentencePiece model ({reason}); a tiktoken file of that name is not "
        "supported: use the repository's tokenizer.json"
    )


def make_model(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, kind: int
) -> Any:
    """Make a `ModelProto` of `kind` that does not normalize text; set its `normalizer_spec` to.

    Empty pieces are unused ids. Byte fallback is enabled if a piece is of type BYTE.
    """
    model = ModelProto()
    for index, (piece, score, type_) in enumerate(zip(pieces, scores, types, strict=True)):
        if piece and "\0" not in piece:
            model.pieces.add(piece=piece, score=score, type=type_)
        else:  # the library refuses such pieces; a control piece never matches a text
            model.pieces.add(piece=f"\1hole {index}", type=CONTROL)
    model.trainer_spec.model_type = kind
    model.trainer_spec.byte_fallback = BYTE in types
    model.trainer_spec.unk_id = next((i for i, t in enumerate(types) if t == UNKNOWN), 0)
    spec = model.normalizer_spec
    spec.name = "identity"
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    return model


def strips_leading_space(model: Any) -> bool:
    """Whether decoding removes the space that encoding adds before a text."""
    spec = model.normalizer_spec
    return spec.add_dummy_prefix or spec.remove_extra_whitespaces
