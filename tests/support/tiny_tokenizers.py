"""Tiny tokenizers of every kind, as Hugging Face directories and as GGUF files.

They were trained once (`tests/references/make_tokenizer_references.py`) and are stored in
tests/references/tokenizers/, because trainers break ties differently from run to run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from gguf.constants import TokenType

# The generated protobuf module has no source and defines its classes at run time.
from sentencepiece.sentencepiece_model_pb2 import (  # pyright: ignore[reportMissingModuleSource]
    ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
)

from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.loading.gguf_header import read_header
from jaxinfer.loading.tokenizers.gguf import build_tokenizer as build_from_gguf
from jaxinfer.loading.tokenizers.huggingface import build_tokenizer
from jaxinfer.text.chat_template import ChatTemplateError
from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.text.tokenizer import Tokenizer
from tests.support import gguf_files as files
from tests.support.chat_templates import TEMPLATES
from tests.support.difficult_texts import DIFFICULT_TEXTS
from tests.support.paths import REFERENCES

FOLDER = REFERENCES / "tokenizers"
DIRECTORIES = (
    "byte_level_gpt2",
    "byte_level_llama3",
    "byte_level_qwen2",
    "bpe_llama",
    "bpe_gemma",
    "unigram_t5",
    "unigram_bytes",
    "wordpiece_uncased",
    "wordpiece_cased",
    "wordlevel",
    "files_gpt2",
    "files_roberta",
    "files_qwen2",
    "files_bert",
    "model_bpe",
    "model_unigram",
)
# Models on which transformers, which rebuilds them, differs from the sentencepiece library.
DIFFERS = ("model_unigram",)


def read_model(raw: bytes) -> Any:
    model = ModelProto()
    model.ParseFromString(raw)
    return model


def charsmap_of(raw: bytes) -> bytes:
    """Return the character map of a SentencePiece model."""
    return read_model(raw).normalizer_spec.precompiled_charsmap


@cache
def directory_tokenizer(name: str) -> Tokenizer:
    return build_tokenizer(FOLDER / name, GenerationDefaults())


def digest(value: Any) -> str:
    """Return a short digest of ids or of a text, to compare two runs."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def record(ids: Sequence[int], shown: str, whole: str) -> list[Any]:
    """Make the record of a text: the number of ids, and digests of ids and of two decoded texts."""
    return [len(ids), digest(list(ids)), digest(shown), digest(whole)]


def records(tokenizer: Tokenizer) -> list[list[Any]]:
    """Make the records of all difficult texts, with special tokens added."""
    rows = []
    for text in DIFFICULT_TEXTS:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        rows.append(record(ids, tokenizer.decode(ids), whole))
    return rows


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> str:
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return "".join([*map(stream.push, ids), stream.finish()])


def with_template(name: str, folder: Path) -> tuple[Path, Tokenizer]:
    """Copy the directory of the chat template `name`; return the copy and its tokenizer."""
    template, directory = TEMPLATES[name]
    shutil.copytree(FOLDER / directory, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder, build_tokenizer(folder, GenerationDefaults())


def chat_row(encode: Callable[..., Sequence[int]], messages: Any, variables: Any) -> Any:
    """Make the record of a conversation; None if the template refuses it."""
    # A fixed date, because some templates use today's.
    try:
        ids = encode(messages, **{"date_string": "1 May", **variables})
    except (ChatTemplateError, jinja2.TemplateError):
        return None
    return [len(ids), digest(list(ids))]


# GGUF files of the same vocabularies, written by the format's own package


def gguf_tokenizer(path: Path) -> Tokenizer:
    return build_from_gguf(path, read_header(path).metadata)


def write_byte_level(path: Path, name: str, pre: str, **extra: Any) -> Tokenizer:
    """Write the byte-level tokenizer of directory `name` as a converter does, and load it."""
    stored = json.loads((FOLDER / name / "tokenizer.json").read_text("utf-8"))
    added = {token["id"]: token for token in stored["added_tokens"]}
    ids = stored["model"]["vocab"] | {token["content"]: i for i, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    types = [
        TokenType.NORMAL
        if i not in added
        else TokenType.CONTROL
        if added[i]["special"]
        else TokenType.USER_DEFINED
        for i in range(len(tokens))
    ]
    merges = [" ".join(merge) for merge in stored["model"]["merges"]]
    writer = files.new_writer(path)
    files.add_vocabulary(writer, "gpt2", tokens, types, pre=pre, merges=merges, extra=extra)
    files.finish(writer)
    return gguf_tokenizer(path)


def write_wordpiece(path: Path, name: str, **extra: Any) -> Tokenizer:
    """Write the WordPiece tokenizer of directory `name`, with U+2581 before words and no `##`."""
    stored = json.loads((FOLDER / name / "tokenizer.json").read_text("utf-8"))
    ids = stored["model"]["vocab"]
    special = {token["id"] for token in stored["added_tokens"]}
    tokens, types = [], []
    for word in sorted(ids, key=ids.__getitem__):
        is_special = ids[word] in special
        types.append(TokenType.CONTROL if is_special else TokenType.NORMAL)
        is_plain = is_special or (word.startswith("[") and word.endswith("]"))
        tokens.append(word if is_plain else word[2:] if word.startswith("##") else "▁" + word)
    writer = files.new_writer(path)
    keys = {"unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]", "mask": "[MASK]"}
    named = {f"{key}_token_id": ids[token] for key, token in keys.items()}
    named |= {"bos_token_id": ids["[CLS]"], **extra}
    files.add_vocabulary(writer, "bert", tokens, types, extra=named)
    files.finish(writer)
    return gguf_tokenizer(path)


def write_sentencepiece(path: Path, name: str, kind: str, **extra: Any) -> Tokenizer:
    """Write the SentencePiece model of directory `name` as a "llama" or a "t5" vocabulary."""
    model = read_model((FOLDER / name / "tokenizer.model").read_bytes())
    spec, trainer = model.normalizer_spec, model.trainer_spec
    writer = files.new_writer(path)
    ids = {"bos": trainer.bos_id, "eos": trainer.eos_id, "unknown": trainer.unk_id}
    named = {f"{key}_token_id": i for key, i in ids.items() if i >= 0}
    named |= {"add_space_prefix": spec.add_dummy_prefix}
    named |= {"remove_extra_whitespaces": spec.remove_extra_whitespaces, **extra}
    files.add_vocabulary(
        writer,
        kind,
        [piece.piece for piece in model.pieces],
        [piece.type for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        extra=named,
    )
    if spec.precompiled_charsmap:
        writer.add_precompiled_charsmap(spec.precompiled_charsmap)
    files.finish(writer)
    return gguf_tokenizer(path)
