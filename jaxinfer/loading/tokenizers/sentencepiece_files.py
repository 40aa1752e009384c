"""A Hugging Face directory whose tokenizer is a SentencePiece model alone.

Ids are those of the `sentencepiece` library. What transformers lays over it is laid over here:
control pieces are found in the text as special tokens, `added_tokens.json` and
`tokenizer_config.json` add and rename tokens, and `add_bos_token` and `add_eos_token` say what goes
around a text (nothing where they are silent, as in transformers 5, save for T5's end token).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxinfer.loading.checkpoint import CheckpointError, read_json_object
from jaxinfer.loading.tokenizers.sentencepiece_backend import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceBackend,
    read_model,
    strips_leading_space,
)
from jaxinfer.loading.tokenizers.token_bytes import make_table, sentencepiece_decoding
from jaxinfer.loading.tokenizers.tokenizer_parts import TokenizerParts, around

NAMES = ("tokenizer.model", "spiece.model")
# Their ids are those of the pieces shifted, by rules of the class.
_SHIFTED = ("XLMRobertaTokenizer", "CamembertTokenizer", "MBartTokenizer", "PegasusTokenizer")


class Added(NamedTuple):
    """Tokens beside the model's: by id, and the special ones of the names it is called with."""

    listed: Mapping[int, tokenizers.AddedToken]
    special: Callable[[Mapping[str, str]], Iterable[tokenizers.AddedToken]]


def from_sentencepiece(
    path: Path,
    config: Mapping[str, Any],
    kind: str | None,
    named: Mapping[str, str],
    beside: Added,
) -> TokenizerParts:
    """The tokenizer of the model file `path`, of class `kind`, with the tokens of other files.

    `named` are the special tokens that `tokenizer_config.json` names.
    """
    if kind in _SHIFTED:
        raise CheckpointError(
            f"{path}: a {kind} numbers these pieces anew; add the repository's tokenizer.json"
        )
    model = read_model(path)
    names = {**_names(model), **named}
    tokens: list[str | None] = [piece.piece for piece in model.pieces]
    types = [piece.type for piece in model.pieces]
    added = {
        i: tokenizers.AddedToken(piece.piece, special=True, normalized=False)
        for i, piece in enumerate(model.pieces)
        if piece.type in (CONTROL, UNKNOWN)
    }
    for index, token in beside.listed.items():
        tokens += [None] * (index + 1 - len(tokens))
        # A piece that the model itself looks for stays the model's: its rule is the longest first.
        if index >= len(types) or types[index] != USER_DEFINED or tokens[index] != token.content:
            added[index] = token
        tokens[index] = token.content
    _add_special(tokens, added, beside.special(names))
    table = make_table(tokens, sentencepiece_decoding(strips_leading_space(model)))
    table = table.with_plain({i: token.content for i, token in added.items()})
    every_part = config.get("legacy")
    backend = SentencePieceBackend(
        path,
        model,
        tokens,
        added,
        prefixes_every_part=kind != "LlamaTokenizer" if every_part is None else bool(every_part),
    )
    return TokenizerParts(
        backend,
        table,
        special=frozenset(i for i, token in added.items() if token.special),
        named=names,
        prefix=around("bos", path.parent, config, backend, names),
        suffix=around("eos", path.parent, config, backend, names, default=kind == "T5Tokenizer"),
    )


def _names(model: Any) -> dict[str, str]:
    """The special tokens that the model itself names."""
    spec, size = model.trainer_spec, len(model.pieces)
    ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id}
    return {name: model.pieces[i].piece for name, i in ids.items() if 0 <= i < size}


def _add_special(
    tokens: list[str | None],
    added: dict[int, tokenizers.AddedToken],
    special: Iterable[tokenizers.AddedToken],
) -> None:
    """Special tokens that the model lacks take the next ids, as in transformers."""
    ids = {token: i for i, token in enumerate(tokens)}
    for token in special:
        index = ids.setdefault(token.content, len(tokens))
        if index == len(tokens):
            tokens.append(token.content)
        added.setdefault(index, token).special = True


def listed_in(path: Path) -> dict[int, tokenizers.AddedToken]:
    """The tokens of an `added_tokens.json`, by id."""
    listed = read_json_object(path)
    if not all(type(i) is int and i >= 0 for i in listed.values()):
        raise CheckpointError(f"{path}: is not an object of token ids")
    return {i: tokenizers.AddedToken(text, normalized=False) for text, i in listed.items() if text}
