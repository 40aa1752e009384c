"""BERT's WordPiece tokenizer (Devlin et al. 2019, arXiv:1810.04805).

Text is cleaned and perhaps lower-cased, then split at spaces and punctuation; each word is split
greedily into the longest known pieces from its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

CONTINUATION_PREFIX = "##"  # of a piece that does not begin a word


class BertText(NamedTuple):
    """How text is normalized; `strip_accents` of None has the value of `lowercase`."""

    lowercase: bool = True
    strip_accents: bool | None = None
    splits_chinese: bool = True


def bert_backend(
    vocabulary: Mapping[str, int], unknown: str, text: BertText
) -> tokenizers.Tokenizer:
    """Build the tokenizer of `vocabulary`, in which pieces inside a word begin with `##`."""
    backend = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=text.splits_chinese,
        strip_accents=text.strip_accents,
        lowercase=text.lowercase,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    return backend


def enclose_texts(backend: tokenizers.Tokenizer, first: str, last: str) -> None:
    """Make the tokenizer add the tokens `first` and `last` around every text."""
    ids = {token: backend.token_to_id(token) for token in (first, last)}
    backend.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last], special_tokens=list(ids.items())
    )
