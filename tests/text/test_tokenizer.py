"""Ids equal those of the reference, decoding restores the text, and invalid input is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.demo import demo_model_path
from jaxinfer.text.tokenizer import Tokenizer
from tests.support import gguf_files as files

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)

DIFFICULT_TEXTS = (
    "Hello world! It's 1,234.56 o'clock; don't DON'T we'LL y'all'd've.",
    "def f(x):\n    return x**2  # comment\n\n\tif x == 10:\r\n\r\n        pass   ",
    "  leading, and    many     spaces\t\ttabs\n\n\n\nnewlines \n \n mixed",
    "naïve café Straße ÅÄÖ ﬁ Å (decomposed: A\u030a) İstanbul",
    "日本語のテキスト 한국어 中文\uff0c标点。 русский العربية עברית हिन्दी ไทย",
    "😀 👨‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 \u200b zero\u200dwidth \ufeff",
    "∑∫√ ≤≥ ≠ ±",
    "https://example.org/a?b=c&d=%20#e_f-g~h <html attr='v'>{\"k\": [1, 2]}</html>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|endoftext|><file_sep>x",
    "<|im_start <|im_end|>>|im_end|> <|IM_END|>",
    "a" * 300 + " " * 70 + "!" * 50,
    "\x00\x01\x07\x1b[0m",
    "",
    " ",
)
# Runs of spaces before a digit. The rule splits off the digit first, so the spaces stay together.
# transformers reads GGUF vocabularies without that rule, so the rule is added for the comparison.
SPACED_DIGITS = (
    "a  1",
    "12   345\n\n7  8",
    "x = [  1,   2]",
    "½ ² Ⅷ ٣٤ \uff11\uff12",
    "\n\n3. item\n\n4. item",
)


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]


# The tokenizer of SmolLM2, from the demo file


def assert_same_ids_and_text(theirs: Any, texts: tuple[str, ...]) -> None:
    ours = files.demo_tokenizer()
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parity
def test_smollm2_ids_equal_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    pytest.importorskip("torch", reason="transformers reads GGUF with torch")
    path = demo_model_path()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert_same_ids_and_text(theirs, DIFFICULT_TEXTS)
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    assert_same_ids_and_text(theirs, DIFFICULT_TEXTS + SPACED_DIGITS)


def test_smollm2_splits_off_every_digit():
    tokenizer = files.demo_tokenizer()
    assert pieces(tokenizer, "in 12345") == ["in", "Ġ", "1", "2", "3", "4", "5"]
    assert pieces(tokenizer, "a  1") == ["a", "ĠĠ", "1"]


def test_smollm2_decoding_restores_text_whose_bytes_are_in_the_vocabulary():
    tokenizer = files.demo_tokenizer()
    for text in DIFFICULT_TEXTS[:-3]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_smollm2_special_tokens_have_one_id_and_are_skipped_in_text():
    tokenizer = files.demo_tokenizer()
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("a<|im_end|>b")[1] == 2
    assert tokenizer.decode([1, 2, 0]) == ""
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((2, 0), 1)
    assert tokenizer.vocab_size == 49152


def test_smollm2_chat_ids_equal_those_of_the_rendered_prompt():
    tokenizer = files.demo_tokenizer()
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_byte_level_decoding_equals_the_library_for_any_ids(ids, skip):
    tokenizer = files.demo_tokenizer()
    theirs = tokenizer._backend
    assert isinstance(theirs, Backend)
    theirs.decoder = decoders.ByteLevel()
    assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
        ids, skip_special_tokens=skip
    )


# Byte-level vocabularies


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    return files.small_tokenizer(tmp_path_factory.mktemp("byte"), "byte")


def test_merges_apply_in_order_and_added_tokens_stay_whole(byte_tokenizer):
    assert pieces(byte_tokenizer, "hello world") == ["hello", "Ġworld"]
    assert pieces(byte_tokenizer, "he<|tool é|>ll<|end|>") == ["he", "<|tool é|>", "ll", "<|end|>"]


@settings(max_examples=200, deadline=None)
@given(text=UNICODE)
def test_byte_level_decoding_restores_any_text(text, byte_tokenizer):
    ids = byte_tokenizer.encode(text)
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_user_defined_tokens_are_in_the_text_and_control_tokens_are_not(byte_tokenizer):
    ids = byte_tokenizer.encode("<|begin|>a<|tool é|><|end|>")
    assert byte_tokenizer.decode(ids) == "a<|tool é|>"


def test_ids_and_tokens_map_both_ways(byte_tokenizer):
    assert byte_tokenizer.token_to_id("hello") == files.BYTE_TOKENS.index("hello")
    assert byte_tokenizer.id_to_token(0) == "<|end|>"
    assert byte_tokenizer.token_to_id("missing") is None
    assert byte_tokenizer.id_to_token(10**6) is None
    assert byte_tokenizer.id_to_token(-1) is None


def test_ids_beyond_the_vocabulary_are_empty_and_negative_ids_are_refused(byte_tokenizer):
    size = byte_tokenizer.vocab_size
    assert byte_tokenizer.decode([size, size + 100]) == ""
    with pytest.raises(ValueError, match=f"-1 is negative; ids are 0 to {size - 1}"):
        byte_tokenizer.decode([-1])


def test_lone_surrogate_is_refused_with_its_position(byte_tokenizer):
    with pytest.raises(ValueError, match=r"surrogate '.ud800' at character 2"):
        byte_tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, ["<|begin|>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|begin|>", "<|end|>"]),
        ({"pre": "llama-bpe"}, ["<|begin|>"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"pre": "midm-2.0"}, ["<|begin|>"]),
        # RoBERTa as converters write it: the separator is for pairs, so the end is added only once.
        (
            {
                "pre": "roberta-bpe",
                "seperator_token_id": 0,
                **dict.fromkeys(("add_bos_token", "add_eos_token", "add_sep_token"), True),
            },
            ["<|begin|>", "<|end|>"],
        ),
    ],
)
def test_bos_and_eos_follow_the_file_or_its_pre_tokenizer(flags, expected, tmp_path):
    tokenizer = files.small_tokenizer(tmp_path, "byte", **flags)
    assert pieces(tokenizer, "") == expected
    assert tokenizer.encode("", add_special_tokens=False) == []
    with_text = pieces(tokenizer, "he")
    assert [piece for piece in with_text if piece != "he"] == expected


def test_word_in_the_vocabulary_skips_merges_if_the_rule_says_so(tmp_path):
    tokens = ("h", "e", "y", "he", "ey", "hey")
    for pre, expected in (("llama-bpe", ["hey"]), ("gpt-2", ["he", "y"])):
        writer = files.new_writer(tmp_path / "a.gguf")
        merges = ["h e", "e y", "h ey"]
        files.add_vocabulary(writer, "gpt2", tokens, pre=pre, merges=merges)
        files.finish(writer)
        assert pieces(open_checkpoint(tmp_path / "a.gguf").tokenizer(), "hey") == expected


def test_qwen2_text_is_normalized_to_nfc(tmp_path):
    tokenizer = files.small_tokenizer(tmp_path, "byte", pre="qwen2")
    assert tokenizer.decode(tokenizer.encode("A\u030a")) == "\u00c5"


# SentencePiece vocabularies


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory) -> Tokenizer:
    return files.small_tokenizer(tmp_path_factory.mktemp("piece"), "piece")


def reference_pieces(text: str) -> list[str]:
    """Apply the SentencePiece rule in steps: join the adjacent pair with the best joint score."""
    scores = dict(zip(files.PIECES, files.PIECE_SCORES[259:-1], strict=True))
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            break
        index = min(pairs)[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    out: list[str] = []
    for symbol in symbols:
        known = symbol in scores
        out += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return out


@settings(max_examples=300, deadline=None)
@given(text=st.text("helowrdé世 🦙", min_size=1, max_size=30))
def test_pieces_join_by_score_like_sentencepiece(text, piece_tokenizer):
    assert pieces(piece_tokenizer, text)[1:] == reference_pieces(" " + text)


def is_plain(text: str) -> bool:
    """Return whether `text` contains neither a special token nor "▁", which stands for a space."""
    return not any(special in text for special in ("▁", "<s>", "</s>", "<unk>", "<tool>"))


@settings(max_examples=200, deadline=None)
@example(text="<0x41> < s>")
@given(text=UNICODE.filter(is_plain))
def test_sentencepiece_decoding_restores_any_text(text, piece_tokenizer):
    assert piece_tokenizer.decode(piece_tokenizer.encode(text)) == text


def test_bos_and_a_space_precede_each_text(piece_tokenizer):
    assert pieces(piece_tokenizer, "hello world") == ["<s>", "▁hello", "▁world"]
    assert pieces(piece_tokenizer, "</s>hello<tool>hello") == [
        *("<s>", "</s>", "▁hello", "<tool>", "▁hello")
    ]


def test_no_space_is_added_or_stripped_without_space_prefix(tmp_path):
    tokenizer = files.small_tokenizer(tmp_path, "piece", add_space_prefix=False)
    assert pieces(tokenizer, "hello") == ["<s>", "hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


VALID_PIECE = st.one_of(
    st.sampled_from([0, 1, 2, *range(259, len(files.PIECE_TOKENS))]).map(lambda i: [i]),
    st.characters(exclude_categories=["Cs"]).map(lambda c: [3 + byte for byte in c.encode()]),
)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(VALID_PIECE, max_size=15), skip=st.booleans())
def test_sentencepiece_decoding_equals_the_library_for_valid_bytes(parts, skip, piece_tokenizer):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    theirs = Backend(models.WordLevel({token: i for i, token in enumerate(files.PIECE_TOKENS)}))
    theirs.add_special_tokens(list(files.PIECE_TOKENS[:3]))
    theirs.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    ids = [i for part in parts for i in part]
    assert piece_tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
        ids, skip_special_tokens=skip
    )


def test_only_the_invalid_bytes_of_a_run_are_replaced(piece_tokenizer):
    run = [3 + byte for byte in "世".encode()] + [3 + 0xE4, 3 + 0xB8]
    assert piece_tokenizer.decode(run) == "世\ufffd"


def test_base_model_without_a_template_refuses_messages(piece_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        piece_tokenizer.encode_chat([{"role": "user", "content": "hi"}])
