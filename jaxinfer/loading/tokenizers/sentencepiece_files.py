"""Read a Hugging Face directory whose tokenizer is a SentencePiece model without a tokenizer.json.

Ids are those of the `sentencepiece` library. As in transformers, control pieces are matched in the
text as special tokens, `added_tokens.json` and `tokenizer_config.json` add and rename tokens, and
`add_bos_token` and `add_eos_token` control the tokens around a text. By default none is added, as
in transformers 5, except T5's end token.
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
from jaxinfer.loading.tokenizers.tokenizer_parts import TokenizerParts, affix_ids

NAMES = ("tokenizer.model", "spiece.model")
# Classes whose ids are the pieces' ids, shifted by rules of the class.
_SHIFTED = ("XLMRobertaTokenizer", "CamembertTokenizer", "MBartTokenizer", "PegasusTokenizer")


class ExtraTokens(NamedTuple):
    """Tokens of other files: by id, and the special ones as a function of the named tokens."""

    listed: Mapping[int, tokenizers.AddedToken]
    special: Callable[[Mapping[str, str]], Iterable[tokenizers.AddedToken]]


def from_sentencepiece(
    path: Path,
    config: Mapping[str, Any],
    kind: str | None,
    named: Mapping[str, str],
    extra: ExtraTokens,
) -> TokenizerParts:
    """Read the tokenizer of the model file `path`, of class `kind`, with the `extra` tokens.

    `named` are the special tokens that `tokenizer_config.json` names.
    """
    if kind in _SHIFTED:
        raise CheckpointError(
            f"{path}: a {kind} renumbers these pieces; add the repository's tokenizer.json"
        )
    model = read_model(path)
    names = {**_model_names(model), **named}
    tokens: list[str | None] = [piece.piece for piece in model.pieces]
    types = [piece.type for piece in model.pieces]
    added = {
        i: tokenizers.AddedToken(piece.piece, special=True, normalized=False)
        for i, piece in enumerate(model.pieces)
        if piece.type in (CONTROL, UNKNOWN)
    }
    for index, token in extra.listed.items():
        tokens += [None] * (index + 1 - len(tokens))
        # The model itself matches its user-defined pieces, the longest first.
        if index >= len(types) or types[index] != USER_DEFINED or tokens[index] != token.content:
            added[index] = token
        tokens[index] = token.content
    _add_special(tokens, added, extra.special(names))
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
        prefix=affix_ids("bos", path.parent, config, backend, names),
        suffix=affix_ids("eos", path.parent, config, backend, names, default=kind == "T5Tokenizer"),
    )


def _model_names(model: Any) -> dict[str, str]:
    """Return the special tokens that the model itself names."""
    spec, size = model.trainer_spec, len(model.pieces)
    ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id}
    return {name: model.pieces[i].piece for name, i in ids.items() if 0 <= i < size}


def _add_special(
    tokens: list[str | None],
    added: dict[int, tokenizers.AddedToken],
    special: Iterable[tokenizers.AddedToken],
) -> None:
    """Add the special tokens; those that the model lacks get the next ids, as in transformers."""
    ids = {token: i for i, token in enumerate(tokens)}
    for token in special:
        index = ids.setdefault(token.content, len(tokens))
        if index == len(tokens):
            tokens.append(token.content)
        added.setdefault(index, token).special = True


def read_added_tokens(path: Path) -> dict[int, tokenizers.AddedToken]:
    """Read the tokens of an `added_tokens.json`, by id."""
    listed = read_json_object(path)
    if not all(type(i) is int and i >= 0 for i in listed.values()):
        raise CheckpointError(f"{path}: is not an object of token ids")
    return {i: tokenizers.AddedToken(text, normalized=False) for text, i in listed.items() if text}
