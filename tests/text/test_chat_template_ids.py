"""Token ids of rendered conversations equal those of transformers, recorded and computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxinfer.text.chat_template import ChatTemplateError
from jaxinfer.text.tokenizer import Tokenizer
from tests.support import chat_templates as chats
from tests.support import tiny_tokenizers as tiny

every_template = pytest.mark.parametrize("name", chats.TEMPLATES)


def tokenizer_with_template(name: str, folder) -> Tokenizer:
    return tiny.with_template(name, folder)[1]


@every_template
def test_chat_ids_equal_the_records(name, tmp_path):
    ours = tokenizer_with_template(name, tmp_path)
    stored = json.loads((tiny.FOLDER / "difficult_texts.json").read_text("utf-8"))[f"chat {name}"]
    rows = [tiny.chat_row(ours.encode_chat, *case) for case in chats.cases()]
    assert rows == stored
    refused = {"chatml": 0, "llama3": 3, "gemma": 6, "mistral": 9, "sentencepiece": 9}
    assert rows.count(None) == refused[name]


@every_template
@pytest.mark.parity
def test_chat_ids_equal_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    jinja2 = pytest.importorskip("jinja2", reason="transformers renders with it")
    folder, ours = tiny.with_template(name, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for messages, variables in chats.cases():
        expected: Any = None
        try:
            expected = theirs.apply_chat_template(messages, return_dict=False, **variables)
        except jinja2.TemplateError:
            with pytest.raises(ChatTemplateError):
                ours.encode_chat(messages, **variables)
            continue
        assert ours.encode_chat(messages, **variables) == expected
