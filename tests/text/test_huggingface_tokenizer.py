"""Tokenizers of Hugging Face directories: added tokens, BOS and EOS, and chat templates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.text.tokenizer import Tokenizer
from tests.loading.test_huggingface_dir import write_json, write_safetensors
from tests.support import gguf_files as files

MESSAGES = [{"role": "user", "content": "hi"}]


def backend(*, with_bos: bool = False) -> Backend:
    merges = [(left, right) for left, right in (merge.split(" ") for merge in files.MERGES)]
    vocabulary = {token: i for i, token in enumerate(files.BYTE_TOKENS[:-1])}
    made = Backend(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    if with_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
        )
    return made


def write_model(folder: Path, made: Backend, **config: Any) -> Path:
    write_json(folder / "config.json", {})
    write_safetensors(folder / "model.safetensors", {"a": np.zeros(2, np.float32)})
    made.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    return folder


def tokenizer_of(folder: Path, made: Backend, **config: Any) -> Tokenizer:
    return open_checkpoint(write_model(folder, made, **config)).tokenizer()


def test_ids_and_text_equal_those_of_the_backend(tmp_path):
    tokenizer = tokenizer_of(tmp_path, backend(), eos_token="<|end|>")
    ids = tokenizer.encode("hello world<|end|>é")
    assert ids == backend().encode("hello world<|end|>é").ids
    assert tokenizer.decode(ids) == "hello worldé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello world<|end|>é"
    assert tokenizer.eos_token_ids == (0,)


def test_eos_ids_come_from_the_generation_config(tmp_path):
    write_model(tmp_path, backend(), eos_token="<|end|>")
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 0], "bos_token_id": 3})
    tokenizer = open_checkpoint(tmp_path).tokenizer()
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((5, 0), 3)


def test_added_tokens_of_the_config_have_the_stated_options(tmp_path):
    listed = {
        "267": {"content": "<tool>", "special": False},
        "268": {"content": "<think>", "special": True},
    }
    tokenizer = tokenizer_of(
        tmp_path,
        backend(),
        added_tokens_decoder=listed,
        pad_token={"content": "<pad>"},
        additional_special_tokens=["<extra>"],
        bos_token="<|begin|>",
    )
    text = "<tool><think><pad><extra><|begin|>"
    ids = tokenizer.encode(text)
    size = len(files.BYTE_TOKENS) - 1
    assert sorted(ids) == [1, size, size + 1, size + 2, size + 3]
    assert tokenizer.decode(ids) == "<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("first", [266, 267, 300])
def test_added_tokens_with_other_ids_than_stated_cause_a_warning(first, tmp_path, caplog):
    tokens = [f"<extra {i}>" for i in range(8)]
    listed = {str(first + i): {"content": token} for i, token in enumerate(tokens)}
    with caplog.at_level("WARNING"):
        tokenizer = tokenizer_of(tmp_path, backend(), added_tokens_decoder=listed)
    assert [tokenizer.token_to_id(token) for token in tokens] == list(range(267, 275))
    if first == 267:
        assert not caplog.records
    else:
        assert f"'<extra 0>' has id 267, not {first}; " in caplog.text
        assert "; and 3 more" in caplog.text


@pytest.mark.parametrize("key", ["added_tokens_decoder", "additional_special_tokens"])
def test_many_added_tokens_load_quickly(key, tmp_path):
    tokens = [f"<extra {i}>" for i in range(8000)]
    listed = {str(267 + i): {"content": token} for i, token in enumerate(tokens)}
    config: dict[str, Any] = {key: listed if key == "added_tokens_decoder" else tokens}
    write_model(tmp_path, backend(), **config)
    started = time.perf_counter()
    tokenizer = open_checkpoint(tmp_path).tokenizer()
    assert time.perf_counter() - started < 4  # 15 s if they are added one by one
    assert tokenizer.encode(tokens[-1]) == [267 + 7999]


@pytest.mark.parametrize("with_bos", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": None},
    ],
    ids=str,
)
@pytest.mark.parity
def test_bos_and_eos_are_added_like_transformers(with_bos, flags, tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>"}
    write_model(tmp_path, backend(with_bos=with_bos), eos_token="<|end|>", **config, **flags)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = open_checkpoint(tmp_path).tokenizer()
    for text in ("hello", ""):
        assert ours.encode(text) == theirs.encode(text)


def test_post_processor_determines_the_tokens_around_a_text(tmp_path):
    tokenizer = tokenizer_of(tmp_path, backend(with_bos=True), bos_token="<|begin|>")
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.bos_token_id == 1


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    made = backend()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    assert len(tokenizer_of(tmp_path, made).encode("abcdef")) == 6


TEMPLATES = {
    "chat_template.jinja": "from jinja",
    "chat_template.json": json.dumps({"chat_template": "from json"}),
}


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (["chat_template.jinja", "chat_template.json"], "from jinja"),
        (["chat_template.json"], "from json"),
        ([], "from config"),
    ],
)
def test_chat_templates_have_this_precedence(present, expected, tmp_path):
    write_model(tmp_path, backend(), chat_template="from config")
    for name in present:
        (tmp_path / name).write_text(TEMPLATES[name])
    assert open_checkpoint(tmp_path).tokenizer().apply_chat_template(MESSAGES) == expected


def test_default_template_is_used_if_there_are_several(tmp_path):
    listed = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
    ]
    tokenizer = tokenizer_of(
        tmp_path, backend(), chat_template=listed, bos_token="<|begin|>", eos_token="<|end|>"
    )
    assert tokenizer.apply_chat_template(MESSAGES) == "<|begin|>hi<|end|>"
    assert tokenizer.encode_chat(MESSAGES)[0] == 1


def test_directory_without_tokenizer_opens_and_fails_only_on_use(tmp_path):
    write_model(tmp_path, backend())
    (tmp_path / "tokenizer.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, nor tokenizer\.model"):
        checkpoint.tokenizer()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "1.0", "model": {"type": "No"}}'])
def test_damaged_tokenizer_file_is_refused(content, tmp_path):
    write_model(tmp_path, backend())
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a valid tokenizer\.json"):
        open_checkpoint(tmp_path).tokenizer()


def test_decoder_that_cannot_be_streamed_is_refused_with_alternatives(tmp_path):
    made = backend()
    made.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match=r"CTC.*not supported \(byte-level"):
        tokenizer_of(tmp_path, made)


def test_huge_token_id_is_refused_before_the_table_is_allocated(tmp_path):
    write_model(tmp_path, backend())
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 4_000_000_000}, "unk_token": "a"}
    write_json(tmp_path / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    with pytest.raises(CheckpointError, match="token id 4,000,000,000 is not below the limit"):
        open_checkpoint(tmp_path).tokenizer()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 5}, "chat_template is a int"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "added_tokens_decoder"),
    ],
)
def test_damaged_tokenizer_config_is_refused(config, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(tmp_path, backend(), **config)
