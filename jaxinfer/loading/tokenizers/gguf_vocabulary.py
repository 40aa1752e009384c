"""Read and check the vocabulary in a GGUF header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import TokenType

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.tokenizers.tokenizer_parts import MAX_TOKENS

PREFIX = "tokenizer.ggml."
# Keys left out of a checkpoint's metadata: megabytes that only the tokenizer needs.
VOCABULARY_KEYS = frozenset(
    [PREFIX + key for key in ("tokens", "scores", "token_type", "merges", "precompiled_charsmap")]
    + ["tokenizer.huggingface.json", "tokenizer.rwkv.world"]
)
_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)
_UNDEFINED = 0  # some converters write it for normal tokens
# Tokens that end the generated text in every vocabulary that has them. A file names one EOS token,
# often that of a document and not of a chat turn: Phi-3's names <|endoftext|>, but its turns end
# with <|end|>.
END_TOKENS = (
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
_END_SET = frozenset(END_TOKENS)
# In a vocabulary with both of these, <|end|> ends one of several messages of a response (gpt-oss's
# channels), not the response.
_MESSAGE_ENDS = ("<|return|>", "<|call|>")
# The special ids that llama.cpp's loader assumes where a file states none. For "bert" it assumes
# the ids that these tokens have in BERT's first vocabulary; here they are looked up.
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
    """The special token ids of a file.

    `eos` has every id that ends the generated text, those that the file does not name last. An
    encoder's texts are enclosed by `cls` and `sep`.
    """

    bos: int | None
    eos: tuple[int, ...]
    unk: int | None
    pad: int | None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None

    def named(self) -> dict[str, int]:
        """Return the ids by the names that chat templates use."""
        ids = {"bos": self.bos, "eos": self.eos[0] if self.eos else None, "unk": self.unk}
        ids |= {"pad": self.pad, "cls": self.cls, "sep": self.sep, "mask": self.mask}
        return {f"{name}_token": i for name, i in ids.items() if i is not None}


@dataclass(frozen=True)
class Vocabulary:
    """The text and type of every token by id, and the id of every token that has a text.

    `special` are the ids of special tokens, `added` those and the user-defined ones, which are
    matched in a text before all others.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    special: frozenset[int]
    added: frozenset[int]


def special_ids(path: Path, metadata: Mapping[str, Any]) -> SpecialIds:
    """Read the special token ids; raise `CheckpointError` for one outside the vocabulary."""
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
    # "seperator" is the format's own misspelling. Newer files name an encoder's CLS token as BOS.
    bos, cls, sep = read("bos"), read("cls"), read("seperator")
    ids = SpecialIds(
        bos=bos,
        eos=tuple(dict.fromkeys([*(i for i in eos if i is not None), *_end_token_ids(tokens)])),
        unk=read("unknown"),
        pad=read("padding"),
        cls=bos if bos is not None and model == "bert" else cls,
        sep=sep,
        mask=read("mask"),
    )
    if problems:
        raise CheckpointError.listing(path, problems)
    return ids


def _end_token_ids(tokens: Sequence[Any]) -> list[int]:
    """Return the ids of the `END_TOKENS` in a vocabulary."""
    found = {
        token: i for i, token in enumerate(tokens) if isinstance(token, str) and token in _END_SET
    }
    if all(token in found for token in _MESSAGE_ENDS):
        found.pop("<|end|>", None)
    return [found[token] for token in END_TOKENS if token in found]


def read_vocabulary(path: Path, metadata: Mapping[str, Any], ids: SpecialIds) -> Vocabulary:
    """Read and check the tokens of a file; raise `CheckpointError` for damage."""
    tokens = metadata.get(PREFIX + "tokens")
    if not is_strings(tokens) or not tokens:
        raise CheckpointError(f"{path}: {PREFIX}tokens is not a list of strings")
    if len(tokens) > MAX_TOKENS:
        raise CheckpointError(
            f"{path}: {len(tokens):,} tokens are more than the limit of {MAX_TOKENS:,}"
        )
    types = metadata.get(PREFIX + "token_type")
    types = [int(TokenType.NORMAL)] * len(tokens) if types is None else number_list(types)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: {len(tokens):,} tokens but {len(types):,} token types; the file is damaged"
        )
    types, problems = _checked_types(types)
    known: dict[str, int] = {}
    for index, token in enumerate(tokens):
        # Unused ids are written as empty tokens; nothing encodes to them.
        if token and known.setdefault(token, index) != index:
            problems.append(f"token {token!r} has ids {known[token]} and {index}")
    if problems:
        raise CheckpointError.listing(path, problems)
    # Special ids are special even if a converter did not mark the token as such.
    special = {i for i in (ids.bos, *ids.eos, ids.cls, ids.sep) if i is not None}
    special |= {i for i, kind in enumerate(types) if kind in _SPECIAL_TYPES}
    user_defined = {i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED}
    return Vocabulary(tokens, types, known, frozenset(special), frozenset(special | user_defined))


def _checked_types(types: Sequence[Any]) -> tuple[list[int], list[str]]:
    """Return the types as the format's numbers, and the problems found in them."""
    last = int(max(TokenType))
    problems = [
        f"{PREFIX}token_type {index} is {type_!r}, one of {_UNDEFINED} to {last} is needed"
        for index, type_ in enumerate(types)
        if type(type_) is not int or not _UNDEFINED <= type_ <= last
    ]
    normal = int(TokenType.NORMAL)
    return [normal if type_ == _UNDEFINED else type_ for type_ in types], problems


def read_flag(path: Path, metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """Read a boolean of the tokenizer; raise `CheckpointError` for another type."""
    value = metadata.get(PREFIX + key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {PREFIX}{key} is {value!r}, true or false is needed")
    return value


def read_string(path: Path, metadata: Mapping[str, Any], key: str) -> str | None:
    """Read an optional string; raise `CheckpointError` for another type."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: {key} is a {type(value).__name__}, a string is needed")
    return value


def is_strings(value: Any) -> bool:
    """Whether a value is an array of strings."""
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def number_list(value: Any) -> list[Any]:
    """Return a numeric array of the header as a list, or an empty list for anything else."""
    if isinstance(value, tuple):
        return [] if any(isinstance(item, str) for item in value) else list(value)
    return value.tolist() if hasattr(value, "tolist") else []
