"""Ids and text of the difficult texts equal the reference for every kind of tokenizer.

The reference is transformers: its recorded digests, and the library itself if it is installed.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from jaxinfer.text.tokenizer import Tokenizer
from tests.support import tiny_tokenizers as tiny
from tests.support.chat_templates import TEMPLATES
from tests.support.difficult_texts import DIFFICULT_TEXTS

every_kind = pytest.mark.parametrize("name", tiny.DIRECTORIES)


@cache
def recorded() -> dict[str, Any]:
    return json.loads((tiny.FOLDER / "difficult_texts.json").read_text("utf-8"))


@cache
def reference(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    return transformers.AutoTokenizer.from_pretrained(tiny.FOLDER / name)


def assert_rows(tokenizer: Tokenizer, expected: list[list[Any]]) -> None:
    rows = tiny.records(tokenizer)
    assert len(expected) == len(DIFFICULT_TEXTS)
    wrong = [DIFFICULT_TEXTS[i][:40] for i, row in enumerate(rows) if row != expected[i]]
    assert not wrong


def test_records_cover_every_kind_of_tokenizer():
    chats = [f"chat {name}" for name in TEMPLATES]
    assert list(recorded()) == ["versions", *tiny.DIRECTORIES, *chats]


@every_kind
def test_ids_and_text_equal_the_records(name):
    assert_rows(tiny.directory_tokenizer(name), recorded()[name])


@pytest.mark.matrix
@every_kind
def test_streamed_text_equals_decoded_text(name):
    tokenizer = tiny.directory_tokenizer(name)
    for text in DIFFICULT_TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            for skip in (True, False):
                expected = tokenizer.decode(ids, skip_special_tokens=skip)
                assert tiny.streamed(tokenizer, ids, skip=skip) == expected


@every_kind
@pytest.mark.parity
def test_ids_and_text_equal_transformers(name):
    ours, theirs = tiny.directory_tokenizer(name), reference(name)
    differing = 0
    for text in DIFFICULT_TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            same = ours.encode(text, add_special_tokens=special) == ids
            assert same or name in tiny.DIFFERS, text[:60]
            differing += not same
            for skip in (True, False):
                shown = ours.decode(ids, skip_special_tokens=skip)
                assert shown == theirs.decode(ids, skip_special_tokens=skip), text[:60]
    # Two texts, encoded twice each: the character map that transformers rebuilds matches graphemes,
    # not the longest prefix.
    assert differing == (4 if name in tiny.DIFFERS else 0)


@pytest.mark.matrix
@every_kind
@pytest.mark.parity
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_ids_of_any_text_equal_transformers(name, text):
    if name in tiny.DIFFERS:
        return
    ids = reference(name).encode(text)
    assert tiny.directory_tokenizer(name).encode(text) == ids


@pytest.mark.matrix
@every_kind
@pytest.mark.parity
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_of_any_ids_equals_transformers(name, data, skip):
    ours = tiny.directory_tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    names = [ours.id_to_token(i) or "" for i in ids]
    if any(
        name.startswith("<0x") for name in names
    ):  # transformers replaces a whole run with one stray byte
        return
    shown = ours.decode(ids, skip_special_tokens=skip)
    assert shown == reference(name).decode(ids, skip_special_tokens=skip)
    assert shown == tiny.streamed(ours, ids, skip=skip)


@pytest.mark.parametrize("name", ["model_bpe", "model_unigram"])
def test_model_without_tokenizer_json_equals_the_sentencepiece_library(name):
    ours = tiny.directory_tokenizer(name)
    theirs = SentencePieceProcessor(model_file=str(tiny.FOLDER / name / "tokenizer.model"))
    special = [ours.id_to_token(i) or "" for i in ours.special_token_ids]
    compared = 0
    for text in DIFFICULT_TEXTS:
        # A special token in the text is that token for jaxinfer, but plain text for sentencepiece.
        if any(token in text for token in (*special, "<tool>")):
            continue
        ids = theirs.encode(text)
        compared += 1
        assert ours.encode(text, add_special_tokens=False) == ids, text[:60]
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    assert compared >= len(DIFFICULT_TEXTS) - 4


# The same vocabularies read from GGUF files


@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("byte_level_gpt2", "gpt-2"),
        ("byte_level_llama3", "llama-bpe"),
        ("byte_level_qwen2", "qwen2"),
    ],
)
def test_gguf_byte_level_vocabulary_equals_its_directory(name, pre, tmp_path):
    ours = tiny.write_byte_level(tmp_path / "a.gguf", name, pre, bos_token_id=3)
    directory = tiny.directory_tokenizer(name)
    # GGUF does not store the options of added tokens, so texts that contain such tokens differ.
    options = ("<mask>", "hello", "##ing")
    for text in DIFFICULT_TEXTS:
        if name == "byte_level_gpt2" and any(token in text for token in options):
            continue
        ids = directory.encode(text)
        assert ours.encode(text) == ids, text[:60]
        assert ours.decode(ids) == directory.decode(ids)


@pytest.mark.parametrize("name", ["wordpiece_uncased", "wordpiece_cased"])
def test_gguf_wordpiece_vocabulary_equals_its_directory(name, tmp_path):
    assert_rows(tiny.write_wordpiece(tmp_path / "a.gguf", name), recorded()[name])


@pytest.mark.parametrize(
    ("name", "kind", "flags"),
    [
        ("model_bpe", "llama", {"add_bos_token": True}),
        ("model_unigram", "t5", {"add_eos_token": True}),
        ("model_unigram", "t5", {}),
    ],
)
def test_gguf_sentencepiece_vocabulary_equals_its_model(name, kind, flags, tmp_path):
    ours = tiny.write_sentencepiece(tmp_path / "a.gguf", name, kind, **flags)
    directory = tiny.directory_tokenizer(name)
    for text in DIFFICULT_TEXTS:
        if any(
            token in text for token in ("<tool>", "<|im_end|>")
        ):  # added to the model's own tokens
            continue
        ids = directory.encode(text)
        assert ours.encode(text) == ids, text[:60]
        for skip in (True, False):
            shown = directory.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == shown
            assert tiny.streamed(ours, ids, skip=skip) == shown
