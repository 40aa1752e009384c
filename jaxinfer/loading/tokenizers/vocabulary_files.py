"""Read tokenizers from the files that predate `tokenizer.json`.

`vocab.txt` is BERT's WordPiece vocabulary; `vocab.json` with `merges.txt` is byte-level BPE as in
GPT-2, RoBERTa and Qwen2. The files do not say how text is normalized and split: that depends on the
tokenizer's class in `tokenizer_config.json`, or else on `model_type` in `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.loading.checkpoint import CheckpointError, read_json_object
from jaxinfer.loading.tokenizers.pretokenizers import SPLIT_RULES
from jaxinfer.loading.tokenizers.tokenizer_parts import MAX_TOKENS, read_text
from jaxinfer.loading.tokenizers.wordpiece import BertText, bert_backend, enclose_texts

MAX_VOCABULARY_BYTES = 64 * 2**20  # the largest in use have 5 MB
_GPT2 = ("GPT2Tokenizer", "CodeGenTokenizer")
_ROBERTA = ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer")
_QWEN2 = ("Qwen2Tokenizer",)
_BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
_CLASS_OF_MODEL = {
    "gpt2": "GPT2Tokenizer",
    "codegen": "CodeGenTokenizer",
    "phi": "CodeGenTokenizer",
    "roberta": "RobertaTokenizer",
    "bart": "BartTokenizer",
    "longformer": "LongformerTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
}
_END = "<|endoftext|>"
_ROBERTA_NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_BERT_NAMES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


class FromFiles(NamedTuple):
    """A tokenizer without its special tokens, and the special tokens by name."""

    backend: tokenizers.Tokenizer
    named: Mapping[str, str]


def tokenizer_class(config: Mapping[str, Any], model_type: Any) -> str | None:
    """Return the class in `tokenizer_config.json`, or else the usual one for `model_type`."""
    name = config.get("tokenizer_class")
    if isinstance(name, str) and name:
        return name.removesuffix("Fast")
    return _CLASS_OF_MODEL.get(model_type) if isinstance(model_type, str) else None


def from_vocab_json(
    directory: Path, config: Mapping[str, Any], kind: str | None, named: Mapping[str, str]
) -> FromFiles:
    """Read byte-level BPE from `vocab.json` and `merges.txt`; `named` are given special tokens."""
    path = directory / "vocab.json"
    vocabulary = read_json_object(path, MAX_VOCABULARY_BYTES)
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < MAX_TOKENS:
            raise CheckpointError(
                f"{path}: token {token!r} has id {index!r}, an id below {MAX_TOKENS:,} is needed"
            )
    merges = _merges(directory / "merges.txt", vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.decoder = decoders.ByteLevel()
    has_prefix = config.get("add_prefix_space") is True
    names: Mapping[str, str]
    if kind in _GPT2:
        names = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)
    elif kind in _QWEN2:
        names = dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END)
    elif kind in _ROBERTA:
        names = _ROBERTA_NAMES
    else:
        known = ", ".join((*_GPT2, *_ROBERTA, *_QWEN2))
        raise _unknown_class(directory, "vocab.json and merges.txt", kind, known)
    if kind in _QWEN2:
        rule = SPLIT_RULES["qwen2"]
        backend.pre_tokenizer = rule.pre_tokenizer(add_prefix_space=has_prefix)
        normalizer = rule.normalizer()
        if normalizer is not None:
            backend.normalizer = normalizer
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    names = {**names, **named}
    if kind in _ROBERTA:
        _enclose_texts(path, backend, names)
    return FromFiles(backend, names)


def from_vocab_txt(
    directory: Path, config: Mapping[str, Any], kind: str | None, named: Mapping[str, str]
) -> FromFiles:
    """Read BERT's WordPiece from `vocab.txt`, one token per line; `named` are special tokens."""
    path = directory / "vocab.txt"
    # Ids are line numbers. As in the `tokenizers` library, only \n ends a line.
    lines = read_text(path, MAX_VOCABULARY_BYTES).split("\n")
    words = [line.rstrip() for line in (lines[:-1] if lines[-1] == "" else lines)]
    if kind is not None and kind not in _BERT:
        raise _unknown_class(directory, "vocab.txt", kind, ", ".join(_BERT))
    names = {**_BERT_NAMES, **named}
    text = BertText(
        lowercase=_flag(directory, config, "do_lower_case", True) is True,
        strip_accents=_flag(directory, config, "strip_accents", None),
        splits_chinese=_flag(directory, config, "tokenize_chinese_chars", True) is True,
    )
    backend = bert_backend({word: i for i, word in enumerate(words)}, names["unk_token"], text)
    _enclose_texts(path, backend, names)
    return FromFiles(backend, names)


def _enclose_texts(path: Path, backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> None:
    first, last = names["cls_token"], names["sep_token"]
    missing = [
        token for token in (first, last, names["unk_token"]) if backend.token_to_id(token) is None
    ]
    if missing:
        raise CheckpointError(
            f"{path}: lacks the special tokens {', '.join(map(repr, missing))}; name the right "
            "ones in tokenizer_config.json"
        )
    enclose_texts(backend, first, last)


def _merges(path: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    problems: list[str] = []
    for number, line in enumerate(read_text(path, MAX_VOCABULARY_BYTES).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            pairs.append((left, right))
        else:
            problems.append(f"line {number} is {line!r}, not two tokens that join to a third")
    if problems:
        raise CheckpointError.listing(path, problems)
    return pairs


def _flag(
    directory: Path, config: Mapping[str, Any], key: str, default: bool | None
) -> bool | None:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: {key} is {value!r}, true or false is needed"
        )
    return value


def _unknown_class(directory: Path, files: str, kind: str | None, known: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: {files} belong to a tokenizer of class {kind!r}, known are {known}; set "
        "tokenizer_class in tokenizer_config.json, or add the repository's tokenizer.json"
    )
