"""A tiny random BERT checkpoint with a WordPiece tokenizer and the files of a sentence model."""

from __future__ import annotations

import functools
import json
import string
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer import Embedder
from jaxinfer.build import load_model
from jaxinfer.config import from_mapping
from jaxinfer.options import merge
from tests.support.families_encoders import CASES
from tests.support.family_bench import make_tensors, recorded, write_huggingface

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "cat", "dog", "sat", "on", "mat", "query", ":", ".", ",", "!", "?")
VOCABULARY = (
    *SPECIAL_TOKENS,
    *string.ascii_lowercase,
    *(f"##{letter}" for letter in string.ascii_lowercase),
    *string.digits,
    *WORDS,
)
MAX_LEN = 48  # max_seq_length; the model has 128 positions
DIM = 32
FILES: Mapping[str, Any] = {
    "modules.json": [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": DIM,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    },
    "sentence_bert_config.json": {"max_seq_length": MAX_LEN, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "query: ", "document": ""}},
}
# Few programs, because these tests spend their time compiling.
OPTIONS: dict[str, Any] = {
    "warm_up": False,
    "bucket_growth": 3,
    "scheduler": {"max_num_batched_tokens": 192, "max_num_seqs": 4},
}


def write_tokenizer(folder: Path) -> None:
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.enable_truncation(20)  # such files often have it, and it must be ignored
    backend.enable_padding(length=30)
    backend.save(str(folder / "tokenizer.json"))
    names = {"unk": 1, "cls": 2, "sep": 3, "pad": 0, "mask": 4}
    config = {f"{name}_token": SPECIAL_TOKENS[index] for name, index in names.items()}
    config["tokenizer_class"] = "BertTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def write_encoder(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write the checkpoint with `FILES`, updated with `changes`; None removes a file."""
    row = recorded("encoders")["bert"]
    write_huggingface(CASES["bert"], make_tensors(row["shapes"], CASES["bert"].seed), folder)
    write_tokenizer(folder)
    for name, content in {**FILES, **(changes or {})}.items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


@functools.cache
def checkpoint() -> Path:
    return write_encoder(Path(tempfile.mkdtemp(prefix="tiny-encoder-")) / "tiny")


def tiny_embedder(options: Mapping[str, Any] | None = None, source: Path | None = None) -> Embedder:
    """Make a new embedder with `OPTIONS`, updated with `options`."""
    config = from_mapping(merge(OPTIONS, options or {}))
    embedder, _ = load_model(source or checkpoint(), config, show_progress=False)
    assert isinstance(embedder, Embedder)
    return embedder


def texts_of_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Make token ids that differ for every text, with special tokens around them."""
    return [
        [2, *(5 + (7 * i + 3 * j) % (len(VOCABULARY) - 5) for j in range(length - 2)), 3]
        for i, length in enumerate(lengths)
    ]
