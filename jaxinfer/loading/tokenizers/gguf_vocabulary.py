"""The vocabulary part of a GGUF header, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import TokenType

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.tokenizers.tokenizer_parts import MAX_TOKENS

PREFIX = "tokenizer.ggml."
# Left out of a checkpoint's metadata: megabytes that only the tokenizer reads.
VOCABULARY_KEYS = frozenset(
    [PREFIX + key for key in ("tokens", "scores", "token_type", "merges", "precompiled_charsmap")]
    + ["tokenizer.huggingface.json", "tokenizer.rwkv.world"]
)
_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)
_UNDEFINED = 0  # written by some converters for tokens of no special kind
# Tokens that end an answer wherever a vocabulary has them. Files name one end, often the text's
# and not the turn's: Phi-3's name <|endoftext|>, its turns end with <|end|>.
ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<EOT>",
    "<|return|>",
    "<|call|>",
)
_END_SET = frozenset(ENDS)
# With both of these, <|end|> ends a message of several in one answer (gpt-oss's channels).
_ENDS_OF_MESSAGES = ("<|return|>", "<|call|>")
# Where a file is silent: the special ids that the format's own loader assumes. For "bert" those are
# the places of these tokens in the first such vocabulary; here, wherever they are.
_DEFAULTS: Mapping[Any, Mapping[str, int | str]] = {
    "llama": {"unknown": 0, "bos": 1, "eos": 2},
    "t5": {"padding": 0, "eos": 1, "unknown": 2},
    "bert": {
        "padding": "[PAD]",
        "unknown": "[UNK]",
        "cls": "[CLS]",
        "seperator": "[SEP]",
        "mask": "[MASK]",
    },
}


class SpecialIds(NamedTuple):
    """The ids that the file names; `eos` holds every id that ends an answer, unnamed ones last.

    `cls` and `sep` are what an encoder's texts stand between.
    """

    bos: int | None
    eos: tuple[int, ...]
    unk: int | None
    pad: int | None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None

    def named(self) -> dict[str, int]:
        """The ids by the names that chat templates know."""
        ids = {"bos": self.bos, "eos": self.eos[0] if self.eos else None, "unk": self.unk}
        ids |= {"pad": self.pad, "cls": self.cls, "sep": self.sep, "mask": self.mask}
        return {f"{name}_token": i for name, i in ids.items() if i is not None}


@dataclass(frozen=True)
class Vocabulary:
    """Every token's text and type by id, and the ids of the tokens that have a text.

    `special` are the ids that stand for no text, `added` those and the user-defined: they are found
    in a text before anything else.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    special: frozenset[int]
    added: frozenset[int]


def special_ids(path: Path, metadata: Mapping[str, Any]) -> SpecialIds:
    """The special token ids of a file; `CheckpointError` for one outside the vocabulary."""
    model = metadata.get(PREFIX + "model")
    defaults = _DEFAULTS.get(model if isinstance(model, str) else None, {})
    tokens = metadata.get(PREFIX + "tokens")
    tokens = tokens if isinstance(tokens, tuple) else ()
    limit = len(tokens) or MAX_TOKENS
    problems: list[str] = []

    def read(name: str) -> int | None:
        key = f"{PREFIX}{name}_token_id"
        value, default = metadata.get(key), defaults.get(name)
        if value is None:
            if isinstance(default, str):
                return tokens.index(default) if default in tokens else None
            return default if default is not None and default < limit else None
        if type(value) is not int or not 0 <= value < limit:
            problems.append(f"{key} is {value!r}, a token id below {limit:,} is needed")
            return None
        return value

    eos = (read("eos"), read("eot"), read("eom"))
    # The format's own misspelling; of an encoder's first token newer files speak as BOS.
    bos, cls, sep = read("bos"), read("cls"), read("seperator")
    ids = SpecialIds(
        bos=bos,
        eos=tuple(dict.fromkeys([*(i for i in eos if i is not None), *_ends(tokens)])),
        unk=read("unknown"),
        pad=read("padding"),
        cls=bos if bos is not None and model == "bert" else cls,
        sep=sep,
        mask=read("mask"),
    )
    if problems:
        raise CheckpointError.listing(path, problems)
    return ids


def _ends(tokens: Sequence[Any]) -> list[int]:
    """The ids of the tokens that end an answer by their text."""
    found = {
        token: i for i, token in enumerate(tokens) if isinstance(token, str) and token in _END_SET
    }
    if all(token in found for token in _ENDS_OF_MESSAGES):
        found.pop("<|end|>", None)
    return [found[token] for token in ENDS if token in found]


def read_vocabulary(path: Path, metadata: Mapping[str, Any], ids: SpecialIds) -> Vocabulary:
    """The tokens of a file, checked; `CheckpointError` for damage."""
    tokens = metadata.get(PREFIX + "tokens")
    if not is_strings(tokens) or not tokens:
        raise CheckpointError(f"{path}: {PREFIX}tokens is no list of strings")
    if len(tokens) > MAX_TOKENS:
        raise CheckpointError(
            f"{path}: {len(tokens):,} tokens are more than the limit of {MAX_TOKENS:,}"
        )
    types = metadata.get(PREFIX + "token_type")
    types = [int(TokenType.NORMAL)] * len(tokens) if types is None else numbers(types)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: {len(tokens):,} tokens but {len(types):,} token types; the file is damaged"
        )
    types, problems = _checked_types(types)
    known: dict[str, int] = {}
    for index, token in enumerate(tokens):
        # Holes in a vocabulary are written as empty tokens; nothing encodes to them.
        if token and known.setdefault(token, index) != index:
            problems.append(f"token {token!r} has ids {known[token]} and {index}")
    if problems:
        raise CheckpointError.listing(path, problems)
    # The end of an answer must be recognised even where a converter forgot to mark the token.
    ends = {i for i in (ids.bos, *ids.eos, ids.cls, ids.sep) if i is not None}
    special = ends | {i for i, kind in enumerate(types) if kind in _SPECIAL_TYPES}
    plain = {i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED}
    return Vocabulary(tokens, types, known, frozenset(special), frozenset(special | plain))


def _checked_types(types: Sequence[Any]) -> tuple[list[int], list[str]]:
    """The types as numbers of the format, and what is wrong with them."""
    last = int(max(TokenType))
    problems = [
        f"{PREFIX}token_type {index} is {type_!r}, one of {_UNDEFINED} to {last} is needed"
        for index, type_ in enumerate(types)
        if type(type_) is not int or not _UNDEFINED <= type_ <= last
    ]
    normal = int(TokenType.NORMAL)
    return [normal if type_ == _UNDEFINED else type_ for type_ in types], problems


def flag(path: Path, metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(PREFIX + key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {PREFIX}{key} is {value!r}, true or false is needed")
    return value


def text(path: Path, metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: {key} is a {type(value).__name__}, a string is needed")
    return value


def is_strings(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def numbers(value: Any) -> list[Any]:
    """A numeric array of the header as a list; empty for anything else."""
    if isinstance(value, tuple):
        return [] if any(isinstance(item, str) for item in value) else list(value)
    return value.tolist() if hasattr(value, "tolist") else []
