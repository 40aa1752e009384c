"""Tokenizers without tokenizer.json, and WordPiece and Unigram in GGUF: settings and faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import TokenType

from jaxinfer.loading import CheckpointError
from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.loading.tokenizers.huggingface import build_tokenizer
from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.text.tokenizer import Tokenizer
from tests.support import gguf_files as files
from tests.support import tiny_tokenizers as tiny


def changed(name: str, folder: Path, **config: Any) -> Path:
    """Copy the directory `name`; set keys of its tokenizer_config.json, or remove those of None."""
    shutil.copytree(tiny.FOLDER / name, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    stored = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))
    return folder


def read(folder: Path) -> Tokenizer:
    return build_tokenizer(folder, GenerationDefaults())


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, **options)]


# WordPiece in a stream


def test_wordpiece_stream_separates_words_with_spaces():
    tokenizer = tiny.directory_tokenizer("wordpiece_uncased")
    ids = [tokenizer.token_to_id(piece) for piece in ("run", "##n", "##ing", ".", "the", "[SEP]")]
    assert None not in ids
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    shown = [stream.push(i) for i in ids if i is not None]
    assert shown == ["run", "n", "ing", ".", " the", " [SEP]"]
    assert stream.finish() == ""


def test_wordpiece_text_that_begins_inside_a_word_keeps_the_marker():
    tokenizer = tiny.directory_tokenizer("wordpiece_uncased")
    inside, cls = tokenizer.token_to_id("##ing"), tokenizer.token_to_id("[CLS]")
    assert inside is not None and cls is not None
    assert tokenizer.decode([cls, inside, inside]) == "##inging"


# vocab.txt


def test_bert_settings_follow_the_config(tmp_path):
    plain = read(changed("files_bert", tmp_path / "a"))
    assert pieces(plain, "The CAT")[1] == "the"
    cased = read(changed("files_bert", tmp_path / "b", do_lower_case=False))
    assert pieces(cased, "The") == ["[CLS]", "[UNK]", "[SEP]"]
    accents = read(changed("files_bert", tmp_path / "c", strip_accents=False))
    assert plain.encode("caf\u00e9") == plain.encode("cafe") != accents.encode("caf\u00e9")
    joined = read(changed("files_bert", tmp_path / "d", tokenize_chinese_chars=False))
    assert len(joined.encode("\u4e2d\u6587")) == 3 < len(plain.encode("\u4e2d\u6587"))


def test_model_type_selects_the_tokenizer_without_a_class(tmp_path):
    folder = changed("files_bert", tmp_path, tokenizer_class=None)
    assert read(folder).encode("the") == tiny.directory_tokenizer("files_bert").encode("the")
    folder = changed("files_gpt2", tmp_path / "b", tokenizer_class=None)
    assert read(folder).encode("the") == tiny.directory_tokenizer("files_gpt2").encode("the")


@pytest.mark.parametrize("name", ["files_gpt2", "files_qwen2"])
def test_vocab_and_merges_add_bos_and_eos_of_the_config(name, tmp_path):
    around = {"add_bos_token": True, "bos_token": "<s>", "add_eos_token": True}
    tokenizer = read(changed(name, tmp_path, **around))
    end = tokenizer.id_to_token(tokenizer.eos_token_ids[0])
    assert pieces(tokenizer, " cat") == ["<s>", "\u0120cat", end]
    assert pieces(tokenizer, " cat", add_special_tokens=False) == ["\u0120cat"]


def remove_text(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(path.read_text("utf-8").replace(text, "", 1), "utf-8")

    return change


def replace_file(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


DAMAGED = [
    (
        "files_bert",
        {},
        remove_text("vocab.txt", "[SEP]\n"),
        r"lacks the special tokens '\[SEP\]'",
    ),
    ("files_bert", {}, replace_file("vocab.txt", b"\xff\xfe"), "vocab.txt: cannot be read"),
    ("files_bert", {"do_lower_case": "no"}, None, "do_lower_case is 'no'"),
    ("files_bert", {"tokenizer_class": "MPNetTokenizer"}, None, "class 'MPNetTokenizer'"),
    ("files_gpt2", {"tokenizer_class": "CLIPTokenizer"}, None, "class 'CLIPTokenizer', known"),
    (
        "files_gpt2",
        {},
        replace_file("merges.txt", b"#version: 1\nq zz\n"),
        "line 2 is 'q zz', not two",
    ),
    (
        "files_gpt2",
        {},
        replace_file("vocab.json", b'{"a": -1}'),
        "token 'a' has id -1, an id below",
    ),
    (
        "files_gpt2",
        {},
        replace_file("vocab.json", b'{"a": 4294967296}'),
        "'a' has id 4294967296, a",
    ),
    (
        "files_gpt2",
        {},
        replace_file("vocab.json", b'{"a": "0"}'),
        "token 'a' has id '0', an id",
    ),
    ("model_bpe", {"added_tokens_decoder": {"9" * 5000: {}}}, None, "not an object of token"),
    ("model_bpe", {"added_tokens_decoder": {"\u0661": {}}}, None, "not an object of token"),
    (
        "files_gpt2",
        {},
        replace_file("chat_template.jinja", b" " * (2**20 + 1)),
        "chat_template.jinja: 1,048,577 bytes are more than the limit of 1,048,576",
    ),
    ("files_roberta", {"cls_token": "<cls>"}, None, "lacks the special tokens '<cls>'"),
    (
        "model_bpe",
        {},
        replace_file("tokenizer.model", b"IQ== 0\nIg== 1\n"),
        "a tiktoken file of that",
    ),
    ("model_bpe", {}, replace_file("tokenizer.model", b""), "it has no pieces"),
    (
        "model_bpe",
        {"tokenizer_class": "XLMRobertaTokenizer"},
        None,
        "renumbers these pieces",
    ),
    ("model_bpe", {"add_bos_token": "yes"}, None, "add_bos_token is 'yes'"),
    ("files_qwen2", {"add_bos_token": True}, None, "is true, but there is no bos_token"),
    (
        "model_bpe",
        {"added_tokens_decoder": {"99999999": {"content": "x"}}},
        None,
        "added token id 99,999,999 is not below",
    ),
    (
        "model_bpe",
        {},
        replace_file("added_tokens.json", b'{"x": "y"}'),
        "not an object of token ids",
    ),
]


@pytest.mark.parametrize(("name", "config", "change", "message"), DAMAGED)
def test_damaged_files_are_refused_with_the_reason(name, config, change, message, tmp_path):
    folder = changed(name, tmp_path, **config)
    if change is not None:
        change(folder)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


# tokenizer.model


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer_spec.treat_whitespace_as_suffix", "treat_whitespace_as_suffix"),
        ("denormalizer_spec.precompiled_charsmap", "denormalizer_spec"),
        ("pieces.twice", "not a SentencePiece vocabulary"),
    ],
)
def test_sentencepiece_models_with_unsupported_settings_are_refused(setting, message, tmp_path):
    folder = changed("model_bpe", tmp_path)
    path = folder / "tokenizer.model"
    model = tiny.read_model(path.read_bytes())
    part, name = setting.split(".")
    if name == "twice":
        model.pieces[300].piece = model.pieces[301].piece
    else:
        setattr(getattr(model, part), name, b"x" if name.endswith("map") else True)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=message):
        read(folder)


def test_added_tokens_of_a_model_have_the_stated_ids_and_options():
    tokenizer = tiny.directory_tokenizer("model_bpe")
    assert (tokenizer.token_to_id("<tool>"), tokenizer.token_to_id("<|im_end|>")) == (700, 701)
    assert pieces(tokenizer, "the<tool>  the<|im_end|>") == [
        *("<s>", "\u2581the", "<tool>", "\u2581the", "<|im_end|>")
    ]
    ids = tokenizer.encode("the<tool>  the<|im_end|>")
    assert tokenizer.decode(ids) == "the<tool> the"
    assert tokenizer.id_to_token(10**6) is None


def test_model_with_its_older_file_name_is_found(tmp_path):
    folder = changed("model_unigram", tmp_path, tokenizer_class="T5Tokenizer", add_eos_token=None)
    (folder / "tokenizer.model").rename(folder / "spiece.model")
    assert pieces(read(folder), "the the") == ["\u2581the", "\u2581the", "</s>"]


def test_special_tokens_come_from_the_model():
    tokenizer = tiny.directory_tokenizer("model_bpe")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["<s>", "\u2581the", "</s>", "\u2581the"]),
        ({"legacy": False}, ["<s>", "\u2581the", "</s>", "the"]),
        ({"tokenizer_class": "LlamaTokenizer"}, ["<s>", "\u2581the", "</s>", "the"]),
        (
            {"add_bos_token": False, "add_eos_token": True},
            ["\u2581the", "</s>", "\u2581the", "</s>"],
        ),
        ({"add_bos_token": None}, ["\u2581the", "</s>", "\u2581the"]),
    ],
    ids=str,
)
def test_spaces_and_special_tokens_around_a_text_follow_the_config(config, expected, tmp_path):
    tokenizer = read(changed("model_bpe", tmp_path, **config))
    shown = "".join(piece or "" for piece in pieces(tokenizer, "the</s>the"))
    assert shown == "".join(expected)


def test_added_tokens_json_is_read_if_the_config_has_none(tmp_path):
    folder = changed("model_bpe", tmp_path, added_tokens_decoder=None)
    (folder / "added_tokens.json").write_text('{"<extra>": 700}')
    assert 700 in read(folder).encode("a<extra>b")


@pytest.mark.parametrize("mask", ["<mask>", {"content": "<mask>", "lstrip": True}])
@pytest.mark.parametrize("name", ["model_bpe", "files_gpt2", "byte_level_llama3"])
@pytest.mark.parity
def test_named_tokens_keep_their_stated_options(name, mask, tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    stated = mask if isinstance(mask, str) else {"__type": "AddedToken", **mask, "special": True}
    folder = changed(name, tmp_path, mask_token=stated)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = read(folder)
    for text in ("the <mask> cat", "a  <mask>  b<mask>"):
        assert ours.encode(text) == theirs.encode(text)


def test_known_token_named_by_the_config_is_special(tmp_path):
    tokenizer = read(changed("byte_level_gpt2", tmp_path, eos_token="<tool>"))
    ids = tokenizer.encode("a<tool>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.eos_token_ids == (ids[1],)


# GGUF


def test_gguf_wordpiece_adds_cls_and_sep(tmp_path):
    tokenizer = tiny.write_wordpiece(tmp_path / "a.gguf", "wordpiece_uncased")
    assert pieces(tokenizer, "The and") == ["[CLS]", "the", "and", "[SEP]"]
    assert pieces(tokenizer, "The and", add_special_tokens=False) == ["the", "and"]
    assert tokenizer.decode(tokenizer.encode("the running cat.")) == "the running cat."
    flags = {"add_bos_token": False, "add_sep_token": False}
    bare = tiny.write_wordpiece(tmp_path / "b.gguf", "wordpiece_uncased", **flags)
    assert pieces(bare, "The and") == ["the", "and"]


def test_gguf_wordpiece_with_hash_prefixes_is_supported(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "run", "##ning"]
    writer = files.new_writer(tmp_path / "a.gguf")
    files.add_vocabulary(writer, "bert", tokens, extra={"cls_token_id": 2})
    files.finish(writer)
    tokenizer = tiny.gguf_tokenizer(tmp_path / "a.gguf")
    assert tokenizer.encode("Running run ruN?") == [2, 4, 5, 4, 4, 1, 3]
    assert tokenizer.decode([2, 4, 5, 4, 3]) == "running run"


def test_gguf_unigram_adds_eos_unless_the_file_disables_it(tmp_path):
    tokenizer = tiny.write_sentencepiece(tmp_path / "a.gguf", "model_unigram", "t5")
    assert pieces(tokenizer, "the  the") == ["\u2581the", "\u2581the", "</s>"]
    bare = tiny.write_sentencepiece(
        tmp_path / "b.gguf", "model_unigram", "t5", add_eos_token=False, add_space_prefix=False
    )
    assert pieces(bare, " the\u3000the")[-1] == "\u2581the"
    assert "</s>" not in pieces(bare, "the")


def test_gguf_sentencepiece_accepts_holes_and_missing_bytes(tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "", "\u2581a", "<0x41>"]
    scores = [0.0, 0.0, 0.0, -5.0, -6.0, -7.0, 0.0, -1.0, 0.0]
    files.add_vocabulary(writer, "llama", tokens, scores=scores)
    files.finish(writer)
    tokenizer = tiny.gguf_tokenizer(tmp_path / "a.gguf")
    assert tokenizer.encode("ab zz<0x41>") == [1, 7, 5, 3, 0]
    assert tokenizer.decode([1, 7, 5, 6, 3]) == "ab "


def test_gguf_wordpiece_accepts_special_tokens_without_brackets(tmp_path):
    tokens = ["<pad>", "<unk>", "<s>", "</s>", "\u2581run", "ning"]
    writer = files.new_writer(tmp_path / "a.gguf")
    types = [TokenType.CONTROL] * 4 + [TokenType.NORMAL] * 2
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    files.add_vocabulary(writer, "bert", tokens, types, extra=ids)
    files.finish(writer)
    tokenizer = tiny.gguf_tokenizer(tmp_path / "a.gguf")
    assert tokenizer.encode("running <pad> x") == [2, 4, 5, 0, 1, 3]
    assert tokenizer.id_to_token(1) == "<unk>"
