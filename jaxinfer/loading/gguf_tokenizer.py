"""A tokenizer out of a GGUF file's vocabulary.

Two kinds of vocabulary are supported: "gpt2" (byte-level BPE with explicit merges, text split
first by a rule that the file names) and "llama" (SentencePiece BPE, whose merges follow from the
scores, with byte fallback). Whether BOS and EOS are added, and the special ids of a "llama"
vocabulary, default as in the format's own loader where the file does not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from gguf.constants import TokenType
from tokenizers import models, normalizers

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.pretokenizers import SPLIT_RULES
from jaxinfer.loading.token_bytes import (
    SPACE_SYMBOL,
    Spelling,
    byte_level_spelling,
    sentencepiece_spelling,
)
from jaxinfer.tokenizer import Tokenizer

MAX_TOKENS = 4_194_304  # the largest vocabularies in use have 262,144
MAX_PIECE_CHARS = 256  # SentencePiece trains pieces of up to 16; cost grows with the square
SUPPORTED_MODELS = ("gpt2", "llama")

_PREFIX = "tokenizer.ggml."
# Left out of a checkpoint's metadata: megabytes that only this module reads.
VOCABULARY_KEYS = frozenset(
    [_PREFIX + key for key in ("tokens", "scores", "token_type", "merges", "precompiled_charsmap")]
    + ["tokenizer.huggingface.json", "tokenizer.rwkv.world"]
)
_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)


class SpecialIds(NamedTuple):
    """The ids that the file names; `eos` holds every id that ends an answer."""

    bos: int | None
    eos: tuple[int, ...]
    unk: int | None
    pad: int | None


@dataclass(frozen=True)
class _Vocabulary:
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]  # of the tokens that have a text


def special_ids(path: Path, metadata: Mapping[str, Any]) -> SpecialIds:
    """The special token ids of a file; `CheckpointError` for one outside the vocabulary.

    A "llama" vocabulary that is silent has SentencePiece's: unknown 0, BOS 1, EOS 2.
    """
    is_llama = metadata.get(_PREFIX + "model") == "llama"
    tokens = metadata.get(_PREFIX + "tokens")
    limit = len(tokens) if isinstance(tokens, tuple) else MAX_TOKENS
    problems: list[str] = []

    def read(key: str, default: int | None = None) -> int | None:
        value = metadata.get(_PREFIX + key)
        if value is None:
            return default if default is not None and default < limit else None
        if type(value) is not int or not 0 <= value < limit:
            problems.append(f"{_PREFIX}{key} is {value!r}, a token id below {limit:,} is needed")
            return None
        return value

    eos = (read("eos_token_id", 2 if is_llama else None), read("eot_token_id"))
    ids = SpecialIds(
        bos=read("bos_token_id", 1 if is_llama else None),
        eos=tuple(dict.fromkeys(i for i in (*eos, read("eom_token_id")) if i is not None)),
        unk=read("unknown_token_id", 0 if is_llama else None),
        pad=read("padding_token_id"),
    )
    if problems:
        raise CheckpointError.listing(path, problems)
    return ids


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` of the GGUF file at `path` describes.

    `CheckpointError` for a file without one, for a kind that is not supported, and for a damaged
    vocabulary.
    """
    model = metadata.get(_PREFIX + "model")
    if model is None:
        raise CheckpointError(
            f"{path}: holds no tokenizer ({_PREFIX}model is missing); pass token ids, or use a "
            "directory that has a tokenizer.json"
        )
    if model not in SUPPORTED_MODELS:
        raise CheckpointError(
            f"{path}: tokenizer model {model!r} is not supported ({', '.join(SUPPORTED_MODELS)} "
            "are); use the model's Hugging Face directory with its tokenizer.json"
        )
    vocabulary = _vocabulary(path, metadata)
    ids = special_ids(path, metadata)
    build = _byte_level if model == "gpt2" else _sentencepiece
    backend, spelling, adds_bos = build(path, metadata, vocabulary, ids)

    # The end of an answer must be recognised even where a converter forgot to mark the token.
    ends = {i for i in (ids.bos, *ids.eos) if i is not None}
    special = ends | {i for i, kind in enumerate(vocabulary.types) if kind in _SPECIAL_TYPES}
    plain = {i for i, kind in enumerate(vocabulary.types) if kind == TokenType.USER_DEFINED}
    backend.add_special_tokens(_added(vocabulary, special, is_special=True))
    backend.add_tokens(_added(vocabulary, plain - special, is_special=False))

    prefix = _around(path, metadata, "bos", ids.bos, adds_bos)
    suffix = _around(path, metadata, "eos", ids.eos[0] if ids.eos else None, False)
    named = {"bos_token": ids.bos, "eos_token": ids.eos[0] if ids.eos else None}
    named |= {"unk_token": ids.unk, "pad_token": ids.pad}
    return Tokenizer(
        backend,
        _token_bytes(vocabulary, spelling, special | plain),
        special_token_ids=special,
        eos_token_ids=ids.eos,
        bos_token_id=ids.bos,
        prefix_ids=prefix,
        suffix_ids=suffix,
        strips_leading_space=spelling.strips_leading_space,
        chat_template=_text(path, metadata, "tokenizer.chat_template"),
        named_special_tokens={
            name: vocabulary.tokens[i] for name, i in named.items() if i is not None
        },
    )


def _vocabulary(path: Path, metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = metadata.get(_PREFIX + "tokens")
    if not _is_strings(tokens) or not tokens:
        raise CheckpointError(f"{path}: {_PREFIX}tokens is no list of strings")
    if len(tokens) > MAX_TOKENS:
        raise CheckpointError(
            f"{path}: {len(tokens):,} tokens are more than the limit of {MAX_TOKENS:,}"
        )
    types = metadata.get(_PREFIX + "token_type")
    types = [int(TokenType.NORMAL)] * len(tokens) if types is None else _numbers(types)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: {len(tokens):,} tokens but {len(types):,} token types; the file is damaged"
        )
    ids: dict[str, int] = {}
    problems = []
    for index, token in enumerate(tokens):
        # Holes in a vocabulary are written as empty tokens; nothing encodes to them.
        if token and ids.setdefault(token, index) != index:
            problems.append(f"token {token!r} has ids {ids[token]} and {index}")
    if problems:
        raise CheckpointError.listing(path, problems)
    return _Vocabulary(tokens, types, ids)


def _byte_level(
    path: Path, metadata: Mapping[str, Any], vocabulary: _Vocabulary, ids: SpecialIds
) -> tuple[tokenizers.Tokenizer, Spelling, bool]:
    name = metadata.get(_PREFIX + "pre")
    if name is None:  # files of before May 2024; a guess would give other ids than in training
        raise CheckpointError(
            f"{path}: does not say how to split text ({_PREFIX}pre is missing); convert the model "
            "again with a current converter, or use its Hugging Face directory"
        )
    rule = SPLIT_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise CheckpointError(
            f"{path}: pre-tokenizer {name!r} is not known; known are {', '.join(SPLIT_RULES)}. Use "
            "the model's Hugging Face directory with its tokenizer.json"
        )
    merges = metadata.get(_PREFIX + "merges")
    if merges is None or not _is_strings(merges):
        raise CheckpointError(f"{path}: {_PREFIX}merges is no list of strings")
    pairs: list[tuple[str, str]] = []
    problems: list[str] = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids:
            pairs.append((left, right))
        else:
            problems.append(f"merge {index} is {merge!r}, not two tokens that join to a third")
    if problems:
        raise CheckpointError.listing(path, problems)
    model = models.BPE(dict(vocabulary.ids), pairs, ignore_merges=rule.whole_words_first)
    backend = tokenizers.Tokenizer(model)
    normalizer = rule.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    return backend, byte_level_spelling(), rule.adds_bos


def _sentencepiece(
    path: Path, metadata: Mapping[str, Any], vocabulary: _Vocabulary, ids: SpecialIds
) -> tuple[tokenizers.Tokenizer, Spelling, bool]:
    scores = metadata.get(_PREFIX + "scores")
    if scores is None or len(_numbers(scores)) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{path}: a 'llama' vocabulary needs {_PREFIX}scores, one number for each of its "
            f"{len(vocabulary.tokens):,} tokens"
        )
    has_prefix = _flag(path, metadata, "add_space_prefix", True)
    unknown = None if ids.unk is None else vocabulary.tokens[ids.unk]
    model = models.BPE(
        dict(vocabulary.ids),
        _merges_from_scores(path, vocabulary, _numbers(scores)),
        unk_token=unknown or None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE_SYMBOL)
    steps = [normalizers.Prepend(SPACE_SYMBOL), replace] if has_prefix else [replace]
    backend.normalizer = normalizers.Sequence(steps)
    return backend, sentencepiece_spelling(has_prefix), True


def _merges_from_scores(
    path: Path, vocabulary: _Vocabulary, scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to cut a piece into two pieces, best score of the whole first.

    SentencePiece joins the adjacent pair whose whole scores best; as ranked merges that is
    the same order, with ties broken by the id of the whole, then of its left part.
    """
    ids = vocabulary.ids
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for whole, index in ids.items():
        if vocabulary.types[index] not in (TokenType.NORMAL, TokenType.UNUSED):
            continue
        if len(whole) > MAX_PIECE_CHARS:
            raise CheckpointError(
                f"{path}: token {index} has {len(whole):,} characters, more than the limit of "
                f"{MAX_PIECE_CHARS} for a piece"
            )
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[index], index, ids[left], (left, right)))
    ranked.sort()
    return [pair for _, _, _, pair in ranked]


def _token_bytes(vocabulary: _Vocabulary, spelling: Spelling, added: set[int]) -> list[bytes]:
    """Control and user-defined tokens are written as plain text in every vocabulary."""
    plain = added - {i for i, kind in enumerate(vocabulary.types) if kind == TokenType.BYTE}
    return [
        token.encode("utf-8") if index in plain else spelling.to_bytes(token)
        for index, token in enumerate(vocabulary.tokens)
    ]


def _added(
    vocabulary: _Vocabulary, ids: set[int], *, is_special: bool
) -> list[tokenizers.AddedToken]:
    return [
        tokenizers.AddedToken(vocabulary.tokens[i], special=is_special, normalized=False)
        for i in sorted(ids)
        if vocabulary.tokens[i]
    ]


def _around(
    path: Path, metadata: Mapping[str, Any], which: str, token_id: int | None, default: bool
) -> list[int]:
    """The token that goes before or after every text, if the file or its kind asks for one."""
    key = f"add_{which}_token"
    if not _flag(path, metadata, key, default and token_id is not None):
        return []
    if token_id is None:
        raise CheckpointError(f"{path}: {_PREFIX}{key} is true, but there is no {which}_token_id")
    return [token_id]


def _flag(path: Path, metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {_PREFIX}{key} is {value!r}, true or false is needed")
    return value


def _text(path: Path, metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: {key} is a {type(value).__name__}, a string is needed")
    return value


def _is_strings(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _numbers(value: Any) -> list[Any]:
    """A numeric array of the header as a list; empty for anything else."""
    if isinstance(value, tuple):
        return [] if any(isinstance(item, str) for item in value) else list(value)
    return value.tolist() if hasattr(value, "tolist") else []
