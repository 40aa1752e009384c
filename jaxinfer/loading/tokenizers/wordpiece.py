"""BERT's tokenizer: cleaned and perhaps lower-cased text, cut at spaces and punctuation, and each
word into its longest known beginnings (Devlin et al. 2019, arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

CONTINUES = "##"  # before a piece that does not begin a word


class BertText(NamedTuple):
    """How text is prepared; `strip_accents` of `None` follows `lowercase`."""

    lowercase: bool = True
    strip_accents: bool | None = None
    splits_chinese: bool = True


def bert_backend(
    vocabulary: Mapping[str, int], unknown: str, text: BertText
) -> tokenizers.Tokenizer:
    """The tokenizer of `vocabulary`, whose word-inner pieces begin with `##`."""
    backend = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=text.splits_chinese,
        strip_accents=text.strip_accents,
        lowercase=text.lowercase,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUES)
    return backend


def surround(backend: tokenizers.Tokenizer, first: str, last: str) -> None:
    """Let every encoded text stand between the tokens `first` and `last`."""
    ids = {token: backend.token_to_id(token) for token in (first, last)}
    backend.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last], special_tokens=list(ids.items())
    )
