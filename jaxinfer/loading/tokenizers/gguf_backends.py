"""Build the tokenizer backend of each of the four kinds of GGUF vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from gguf.constants import TokenType
from tokenizers import models

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.tokenizers import sentencepiece_backend as sentencepiece
from jaxinfer.loading.tokenizers.gguf_vocabulary import (
    PREFIX,
    SpecialIds,
    Vocabulary,
    is_strings,
    number_list,
    read_flag,
)
from jaxinfer.loading.tokenizers.pretokenizers import SPLIT_RULES
from jaxinfer.loading.tokenizers.token_bytes import (
    SPACE_SYMBOL,
    TokenTable,
    byte_level_decoding,
    make_table,
    sentencepiece_decoding,
    wordpiece_decoding,
)
from jaxinfer.loading.tokenizers.wordpiece import CONTINUATION_PREFIX, BertText, bert_backend
from jaxinfer.text.tokenizer import Backend


class BuiltBackend(NamedTuple):
    """A backend, the bytes of every token, and whether BOS and EOS are added by default.

    For WordPiece, these are CLS and SEP.
    """

    backend: Backend
    table: TokenTable
    adds_bos: bool
    adds_eos: bool = False


def byte_level(
    path: Path, metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: SpecialIds
) -> BuiltBackend:
    """Build byte-level BPE ("gpt2"): explicit merges, and a split rule that the file names."""
    name = metadata.get(PREFIX + "pre")
    if name is None:  # in files from before May 2024; a guess could give other ids than in training
        raise CheckpointError(
            f"{path}: does not say how to split text ({PREFIX}pre is missing); convert the model "
            "again with a current converter, or use its Hugging Face directory"
        )
    rule = SPLIT_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise CheckpointError(
            f"{path}: pre-tokenizer {name!r} is not known; known are {', '.join(SPLIT_RULES)}. Use "
            "the model's Hugging Face directory with its tokenizer.json"
        )
    merges = _merges(path, metadata, vocabulary)
    model = models.BPE(dict(vocabulary.ids), merges, ignore_merges=rule.whole_words_first)
    backend = tokenizers.Tokenizer(model)
    normalizer = rule.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    _add(backend, vocabulary.tokens, vocabulary.special, vocabulary.added)
    table = make_table(vocabulary.tokens, byte_level_decoding())
    return BuiltBackend(backend, table.with_plain(_plain_tokens(vocabulary)), rule.adds_bos)


def _merges(
    path: Path, metadata: Mapping[str, Any], vocabulary: Vocabulary
) -> list[tuple[str, str]]:
    merges = metadata.get(PREFIX + "merges")
    if merges is None or not is_strings(merges):
        raise CheckpointError(f"{path}: {PREFIX}merges is not a list of strings")
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
    return pairs


def sentencepiece_bpe(
    path: Path, metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: SpecialIds
) -> BuiltBackend:
    """Build SentencePiece BPE ("llama"): scores define the merges, bytes encode unknown letters."""
    model = _make_model(path, metadata, vocabulary, ids, sentencepiece.BPE)
    model.normalizer_spec.add_dummy_prefix = read_flag(path, metadata, "add_space_prefix", True)
    return _sentencepiece(path, model, vocabulary, adds_bos=True, adds_eos=False)


def sentencepiece_unigram(
    path: Path, metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: SpecialIds
) -> BuiltBackend:
    """Build SentencePiece Unigram ("t5"), with the normalization that the file contains."""
    model = _make_model(path, metadata, vocabulary, ids, sentencepiece.UNIGRAM)
    spec = model.normalizer_spec
    spec.add_dummy_prefix = read_flag(path, metadata, "add_space_prefix", False)
    spec.remove_extra_whitespaces = read_flag(path, metadata, "remove_extra_whitespaces", False)
    charsmap = number_list(metadata.get(PREFIX + "precompiled_charsmap", ()))
    try:
        spec.precompiled_charsmap = bytes(byte & 0xFF for byte in charsmap)
    except TypeError as error:
        raise CheckpointError(f"{path}: {PREFIX}precompiled_charsmap is not bytes") from error
    return _sentencepiece(path, model, vocabulary, adds_bos=False, adds_eos=True)


def _make_model(
    path: Path,
    metadata: Mapping[str, Any],
    vocabulary: Vocabulary,
    ids: SpecialIds,
    kind: int,
) -> Any:
    name = metadata[PREFIX + "model"]
    scores = number_list(metadata.get(PREFIX + "scores"))
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{path}: a {name!r} vocabulary needs {PREFIX}scores, one number for each of its "
            f"{len(vocabulary.tokens):,} tokens"
        )
    unknown = ids.unk
    if unknown is None:
        unknown = next((i for i, t in enumerate(vocabulary.types) if t == TokenType.UNKNOWN), None)
    if unknown is None:
        raise CheckpointError(f"{path}: a {name!r} vocabulary needs an unknown_token_id")
    # The library requires exactly one unknown piece, and all of the 256 bytes or none.
    bytes_ = [vocabulary.ids.get(f"<0x{byte:02X}>") for byte in range(256)]
    fallback = set() if None in bytes_ else set(bytes_)
    types: list[int] = []
    for index, type_ in enumerate(vocabulary.types):
        if index == unknown:
            types.append(sentencepiece.UNKNOWN)
        elif index in fallback:
            types.append(sentencepiece.BYTE)
        elif index in vocabulary.added or type_ in (TokenType.UNKNOWN, TokenType.BYTE):
            types.append(sentencepiece.CONTROL)
        else:
            types.append(int(type_))
    return sentencepiece.make_model(vocabulary.tokens, scores, types, kind=kind)


def _sentencepiece(
    path: Path, model: Any, vocabulary: Vocabulary, *, adds_bos: bool, adds_eos: bool
) -> BuiltBackend:
    strips = sentencepiece.strips_leading_space(model)
    added = {
        i: tokenizers.AddedToken(
            vocabulary.tokens[i], special=i in vocabulary.special, normalized=False
        )
        for i in sorted(vocabulary.added)
        if vocabulary.tokens[i]
    }
    backend = sentencepiece.SentencePieceBackend(path, model, vocabulary.tokens, added)
    table = make_table(vocabulary.tokens, sentencepiece_decoding(strips))
    table = table.with_plain(_plain_tokens(vocabulary))
    return BuiltBackend(backend, table, adds_bos, adds_eos)


def wordpiece(
    path: Path, metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: SpecialIds
) -> BuiltBackend:
    """Build WordPiece ("bert"), whose tokens have U+2581 where a word begins.

    The format does not say whether text is lower-cased. It is if no word of the vocabulary has an
    upper-case letter, since such a vocabulary is of no use otherwise.
    """
    if ids.unk is None:
        raise CheckpointError(f"{path}: a 'bert' vocabulary needs an unknown_token_id")
    marks_words = any(token.startswith(SPACE_SYMBOL) for token in vocabulary.tokens)
    words = [
        _bert_token(token, is_special=index in vocabulary.added) if marks_words else token
        for index, token in enumerate(vocabulary.tokens)
    ]
    named = {*ids.named().values(), *vocabulary.added}
    is_cased = any(
        word != word.lower()
        for index, word in enumerate(words)
        if index not in named and not _is_bracketed(word)
    )
    known = {word: i for i, word in enumerate(words) if word}
    backend = bert_backend(known, words[ids.unk], BertText(lowercase=not is_cased))
    special = {*vocabulary.special, *ids.named().values()}
    _add(backend, words, special, vocabulary.added)
    table = make_table(words, wordpiece_decoding(CONTINUATION_PREFIX, True))
    return BuiltBackend(backend, table, True, True)


def _bert_token(token: str, *, is_special: bool) -> str:
    """Return a token as BERT's own files write it."""
    if token.startswith(SPACE_SYMBOL) and len(token) > 1:
        return token[1:]
    if is_special or _is_bracketed(token) or not token:
        return token
    return CONTINUATION_PREFIX + token


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]") and len(token) > 1


def _add(
    backend: tokenizers.Tokenizer, texts: Sequence[str], special: Set[int], added: Set[int]
) -> None:
    """Add the tokens, special ones first, so that the others cannot replace them."""
    backend.add_special_tokens([_added_token(texts[i], True) for i in sorted(special) if texts[i]])
    backend.add_tokens([_added_token(texts[i], False) for i in sorted(added - special) if texts[i]])


def _added_token(text: str, is_special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=is_special, normalized=False)


def _plain_tokens(vocabulary: Vocabulary) -> dict[int, str]:
    """Return the control and user-defined tokens, which decode to their text unchanged."""
    types, tokens = vocabulary.types, vocabulary.tokens
    return {i: tokens[i] for i in vocabulary.added if types[i] != TokenType.BYTE}


BACKENDS = {
    "gpt2": byte_level,
    "llama": sentencepiece_bpe,
    "t5": sentencepiece_unigram,
    "bert": wordpiece,
}
