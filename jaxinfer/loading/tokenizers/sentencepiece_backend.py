"""Encoding by the `sentencepiece` library, for `tokenizer.model` files and GGUF vocabularies.

The library normalizes and segments as in training: its normalization, its single-precision scores
and its ties are not those of a tokenizer rebuilt from the same pieces. Added tokens are cut out
of the text before, by the `tokenizers` library with all its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import (  # pyright: ignore[reportMissingModuleSource]
    ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
)
from tokenizers import models

from jaxinfer.loading.checkpoint import CheckpointError

# Piece types and model types of the format; GGUF numbers its token types alike.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


class Encoded(NamedTuple):
    """What `tokenizers` calls an encoding, as far as it is used."""

    ids: list[int]


class SentencePieceBackend:
    """A SentencePiece model with added tokens, `tokens[i]` being the text of id i.

    `added` are the tokens that are found in a text before it is normalized. What lies between them
    is encoded on its own: each part with the model's space prefix if `prefixes_every_part`, else
    only a part that begins the text. `CheckpointError` for a model that the library refuses.
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
        # A model of whole texts: what is no added token comes out as one unknown word.
        self._outside = len(tokens)
        vocabulary = {token.content: i for i, token in added.items()}
        cutter = models.WordLevel({**vocabulary, "": self._outside}, unk_token="")
        self._cutter = tokenizers.Tokenizer(cutter) if added else None
        if self._cutter is not None:
            self._cutter.add_tokens(list(added.values()))

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Encoded:
        """Token ids of `text`; what goes around it is not this class's business."""
        if self._cutter is None:
            return Encoded(self._processor.encode(text))
        ids: list[int] = []
        parts = self._cutter.encode(text, add_special_tokens=False)
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
    # The library raises RuntimeError, ValueError and others of its own, by the kind of damage.
    except Exception as error:
        raise CheckpointError(f"{path}: not a SentencePiece vocabulary ({error})") from error


def read_model(path: Path) -> Any:
    """The `ModelProto` of a `tokenizer.model` file.

    `CheckpointError` for another kind of file, and for settings whose text cannot be streamed.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    model = ModelProto()
    try:
        model.ParseFromString(raw)
    # protobuf's own DecodeError; its class differs between the implementations.
    except Exception as error:
        raise _no_model(path, str(error)) from error
    if not model.pieces:
        raise _no_model(path, "it holds no pieces")
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise CheckpointError(
            f"{path}: its pieces end with their space (treat_whitespace_as_suffix), which is not "
            "supported; use a tokenizer.json"
        )
    if model.denormalizer_spec.precompiled_charsmap:
        raise CheckpointError(
            f"{path}: it rewrites decoded text (denormalizer_spec), which a stream cannot follow; "
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
    """A `ModelProto` of `kind` that changes no text: set its `normalizer_spec` for more.

    Empty pieces are holes: they take no part. Bytes are fallen back on if any is of that type.
    """
    model = ModelProto()
    for index, (piece, score, type_) in enumerate(zip(pieces, scores, types, strict=True)):
        if piece and "\0" not in piece:
            model.pieces.add(piece=piece, score=score, type=type_)
        else:  # the library takes neither; a control piece is never found in a text
            model.pieces.add(piece=f"\1hole {index}", type=CONTROL)
    model.trainer_spec.model_type = kind
    model.trainer_spec.byte_fallback = BYTE in types
    model.trainer_spec.unk_id = next((i for i, t in enumerate(types) if t == UNKNOWN), 0)
    spec = model.normalizer_spec
    spec.name = "identity"
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    return model


def strips_leading_space(model: Any) -> bool:
    """Whether decoding takes off the space that encoding puts before a text."""
    spec = model.normalizer_spec
    return spec.add_dummy_prefix or spec.remove_extra_whitespaces
