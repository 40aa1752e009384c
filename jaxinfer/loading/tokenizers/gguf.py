"""Build a tokenizer from a GGUF file's vocabulary.

The supported kinds are in `gguf_backends.py`. If the file does not say whether BOS and EOS (CLS and
SEP for an encoder) are added, or which ids are special, the defaults of llama.cpp's loader apply.
The key `add_sep_token` is used for WordPiece vocabularies only: with others (RoBERTa's) it concerns
pairs of texts, and `add_eos_token` concerns the end of a single text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.tokenizers.gguf_backends import BACKENDS
from jaxinfer.loading.tokenizers.gguf_vocabulary import (
    PREFIX,
    read_flag,
    read_string,
    read_vocabulary,
    special_ids,
)
from jaxinfer.text.tokenizer import SpecialTokens, Tokenizer


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that `metadata` of the GGUF file at `path` describes.

    Raises `CheckpointError` if the file has none, or one of an unsupported kind, or a damaged
    vocabulary.
    """
    model = metadata.get(PREFIX + "model")
    if model is None:
        raise CheckpointError(
            f"{path}: has no tokenizer ({PREFIX}model is missing); pass token ids, or use a "
            "directory that has a tokenizer.json"
        )
    build = BACKENDS.get(model) if isinstance(model, str) else None
    if build is None:
        raise CheckpointError(
            f"{path}: tokenizer model {model!r} is not supported ({', '.join(BACKENDS)} are); use "
            "the model's Hugging Face directory with its tokenizer.json"
        )
    ids = special_ids(path, metadata)
    vocabulary = read_vocabulary(path, metadata, ids)
    built = build(path, metadata, vocabulary, ids)
    if model == "bert":
        prefix, suffix = (ids.cls, "add_bos_token"), (ids.sep, "add_sep_token")
    else:
        eos = ids.eos[0] if ids.eos else None
        prefix, suffix = (ids.bos, "add_bos_token"), (eos, "add_eos_token")
    named = ids.named()
    special = SpecialTokens(
        ids={*vocabulary.special, *(named.values() if model == "bert" else ())},
        eos_ids=ids.eos,
        bos_id=ids.bos,
        prefix_ids=_affix_ids(path, metadata, *prefix, built.adds_bos),
        suffix_ids=_affix_ids(path, metadata, *suffix, built.adds_eos),
        named={name: vocabulary.tokens[i] for name, i in named.items()},
    )
    return Tokenizer(
        built.backend,
        built.table.data,
        first_bytes=built.table.first,
        special=special,
        chat_template=read_string(path, metadata, "tokenizer.chat_template"),
    )


def _affix_ids(
    path: Path, metadata: Mapping[str, Any], token_id: int | None, key: str, default: bool
) -> list[int]:
    """Return the token that is added before or after every text, if any."""
    if not read_flag(path, metadata, key, default and token_id is not None):
        return []
    if token_id is None:
        name = key.removeprefix("add_").removesuffix("_token")
        raise CheckpointError(f"{path}: {PREFIX}{key} is true, but there is no {name}_token_id")
    return [token_id]
