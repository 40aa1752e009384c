"""The rules that split text before byte-level merges equal those of the models that use them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers

from jaxinfer.loading.tokenizers.pretokenizers import SPLIT_RULES
from tests.support import tiny_tokenizers as tiny
from tests.support.difficult_texts import DIFFICULT_TEXTS

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def pieces(steps: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in steps.pre_tokenize_str(text)]


def rule_pieces(name: str, text: str) -> list[str]:
    return pieces(SPLIT_RULES[name].pre_tokenizer(), text)


SPLITS = {
    "gpt-2": ["I", "'m", "Ġ12345", "ĠA", "'", "M", "Ġ", "Ġx", "!!", "Ċ", "Ċ", "y"],
    "smollm": ["I", "'m", "Ġ", *"12345", "ĠA", "'", "M", "Ġ", "Ġx", "!!", "Ċ", "Ċ", "y"],
    "llama3": ["I", "'m", "Ġ", "123", "45", "ĠA", "'M", "Ġ", "Ġx", "!!ĊĊ", "y"],
    "qwen2": ["I", "'m", "Ġ", *"12345", "ĠA", "'M", "Ġ", "Ġx", "!!ĊĊ", "y"],
    "tekken": ["I", "'m", "Ġ", *"12345", "ĠA", "'M", "Ġ", "Ġx", "!!ĊĊ", "y"],
    "gpt-4o": ["I'm", "Ġ", "123", "45", "ĠA'M", "Ġ", "Ġx", "!!ĊĊ", "y"],
    "bloom": ["I'm", "Ġ12345", "ĠA'M", "Ġ", "Ġx", "!!ĊĊ", "y"],
    "falcon": ["I", "'", "m", "Ġ", "123", "45", "ĠA", "'", "M", "Ġ", "Ġx", "!!", "Ċ", "Ċ", "y"],
    "deepseek-llm": ["I", "'", "m", "Ġ", *"12345", "ĠA", "'", "M", "Ġ", "Ġx", "!!", "Ċ", "Ċ", "y"],
    "deepseek-v3": ["I", "'m", "Ġ", "123", "45", "ĠA", "'M", "Ġ", "Ġx", "!!ĊĊ", "y"],
}


@pytest.mark.parametrize("name", SPLITS)
def test_rule_splits_text_like_its_models(name):
    text = "I'm 12345 A'M  x!!\n\ny"
    assert rule_pieces(name, text) == SPLITS[name]


@pytest.mark.parametrize("name", SPLIT_RULES)
@settings(max_examples=20, deadline=None)
@given(text=UNICODE)
def test_rule_preserves_all_text(name, text):
    assert decoders.ByteLevel().decode(rule_pieces(name, text)) == text


def sequence(*steps: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(steps))


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# Steps of published tokenizer.json files that are written differently from the rules.
PUBLISHED = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": sequence(pre_tokenizers.Digits(individual_digits=True), GPT2),
    "bloom": sequence(
        pre_tokenizers.Split(
            Regex(r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"), "isolated"
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rule_splits_text_like_the_published_steps(name):
    for text in DIFFICULT_TEXTS:
        assert rule_pieces(name, text) == pieces(PUBLISHED[name], text), text[:40]


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("gpt-2", "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code gigachat"),
        ("gpt-2", "a.x-4.0 mellum exaone4 roberta-bpe"),
        ("llama-bpe", "midm-2.0 falcon3 lfm2"),
        ("qwen2", "f2llmv2"),
        ("deepseek-r1-qwen", "kormo megrez"),
    ],
)
def test_names_share_one_rule(rule, names):
    assert {SPLIT_RULES[name] for name in names.split()} == {SPLIT_RULES[rule]}


@pytest.mark.parity
def test_rules_split_text_like_those_of_transformers():
    reason = "compares with the rules of transformers"
    pytest.importorskip("torch", reason=reason)
    module = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    theirs = pytest.importorskip(module, reason=reason).GGUF_PRE_TOKENIZER_SPLITS
    shared = [name for name in theirs if name in SPLIT_RULES]
    assert {"llama-bpe", "midm-2.0", "tekken", "qwen2", "kormo", "f2llmv2", "qwen35"} <= {*shared}
    assert "gpt-4o" in shared
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name in shared:
        steps = sequence(pre_tokenizers.Split(Regex(theirs[name]), "isolated"), to_bytes)
        for text in DIFFICULT_TEXTS:
            assert rule_pieces(name, text) == pieces(steps, text), (name, text[:40])


# A digest of the pieces into which each distinct rule split all difficult texts when its pattern
# was written. It detects an accidental change of a pattern, even if no other library is installed.
DIGESTS = {
    "default": "d7802ef5f131",
    "falcon": "da3ac9f49699",
    "gpt-2": "43280b00f512",
    "bloom": "acd8f07b1bd1",
    "viking": "2fe4b475a74e",
    "smollm": "8c4391b35624",
    "llama3": "2aacd8e69a47",
    "deepseek-r1-qwen": "b19c0cefb4b7",
    "qwen35": "84a451e00763",
    "tekken": "3495aab32398",
    "gpt-4o": "1e37c722e1f3",
    "deepseek-llm": "c2cfa2b1fb74",
    "deepseek-coder": "e3612fdc2f44",
    "deepseek-v3": "14d3b684942b",
}


def test_records_cover_every_distinct_rule():
    first_of = {rule.patterns: name for name, rule in reversed(SPLIT_RULES.items())}
    assert set(DIGESTS) == set(first_of.values())


@pytest.mark.parametrize("name", DIGESTS)
def test_rule_splits_difficult_texts_as_recorded(name):
    assert tiny.digest([rule_pieces(name, text) for text in DIFFICULT_TEXTS]) == DIGESTS[name]
