"""A tokenizer out of a GGUF file's vocabulary.

The kinds are those of `gguf_backends.py`. Whether BOS and EOS are added (an encoder's CLS and SEP),
and the special ids, default as in the format's own loader where the file does not say. The key
`add_sep_token` is an encoder's alone: beside other vocabularies (RoBERTa's) it speaks of a pair of
texts, and `add_eos_token` of the end of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.tokenizers.gguf_backends import BACKENDS
from jaxinfer.loading.tokenizers.gguf_vocabulary import (
    PREFIX,
    flag,
    read_vocabulary,
    special_ids,
    text,
)
from jaxinfer.text.tokenizer import Tokenizer


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` of the GGUF file at `path` describes.

    `CheckpointError` for a file without one, for a kind that is not supported, and for a damaged
    vocabulary.
    """
    model = metadata.get(PREFIX + "model")
    if model is None:
        raise CheckpointError(
            f"{path}: holds no tokenizer ({PREFIX}model is missing); pass token ids, or use a "
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
        around = (ids.cls, "add_bos_token"), (ids.sep, "add_sep_token")
    else:
        eos = ids.eos[0] if ids.eos else None
        around = (ids.bos, "add_bos_token"), (eos, "add_eos_token")
    named = ids.named()
    return Tokenizer(
        built.backend,
        built.table.data,
        first_bytes=built.table.first,
        special_token_ids={*vocabulary.special, *(named.values() if model == "bert" else ())},
        eos_token_ids=ids.eos,
        bos_token_id=ids.bos,
        prefix_ids=_around(path, metadata, *around[0], built.adds_bos),
        suffix_ids=_around(path, metadata, *around[1], built.adds_eos),
        chat_template=text(path, metadata, "tokenizer.chat_template"),
        named_special_tokens={name: vocabulary.tokens[i] for name, i in named.items()},
    )


def _around(
    path: Path, metadata: Mapping[str, Any], token_id: int | None, key: str, default: bool
) -> list[int]:
    """The token that goes before or after every text, if the file or its kind asks for one."""
    if not flag(path, metadata, key, default and token_id is not None):
        return []
    if token_id is None:
        name = key.removeprefix("add_").removesuffix("_token")
        raise CheckpointError(f"{path}: {PREFIX}{key} is true, but there is no {name}_token_id")
    return [token_id]
