"""Vocabularies of GGUF files and decoders of tokenizer.json: exact results or clear errors."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from gguf.constants import TokenType
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.tokenizers.token_bytes import (
    UnsupportedDecoderError,
    token_decoding,
    token_table,
)
from jaxinfer.text.tokenizer import Tokenizer
from tests.support import gguf_files as files


def write_vocabulary(path: Path, change: str) -> Path:
    """Write a GGUF file whose vocabulary has one fault."""
    writer = files.new_writer(path)
    tokens, types = ["a", "b", "ab", "</s>"], [1, 1, 1, TokenType.CONTROL]
    model, pre, merges, scores = "gpt2", "gpt-2", ["a b"], None
    extra: dict[str, object] = {}
    if change == "model":
        model = "rwkv"
    elif change == "pre":
        pre = "no-such-rule"
    elif change == "no pre":
        pre = None
    elif change == "merge":
        merges = ["a b", "b c", "ab"]
    elif change == "merges":
        merges = None
    elif change == "types":
        types = [1]
    elif change == "type":
        types = [1, 7, -1, 3]
    elif change == "duplicate":
        tokens[1] = "a"
    elif change == "eos id":
        extra = {"eos_token_id": 4, "bos_token_id": 100}
    elif change == "no bos":
        extra = {"add_bos_token": True}
    elif change == "flag":
        extra = {"add_bos_token": "yes"}
    elif change == "scores":
        model, scores = "llama", [1.0]
    elif change == "no unknown":
        model, scores = "t5", [0.0] * 4
        tokens, types = tokens[:2], types[:2]
        scores = scores[:2]
    elif change == "no words":
        model = "bert"
    files.add_vocabulary(writer, model, tokens, types, pre=pre, merges=merges, scores=scores)
    for key, value in extra.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"tokenizer.ggml.{key}", value)  # pyright: ignore[reportArgumentType]
    files.finish(writer)
    return path


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ("model", ["'rwkv' is not supported", "gpt2, llama, t5, bert", "tokenizer.json"]),
        ("pre", ["'no-such-rule' is not known", "smollm", "llama-bpe", "tokenizer.json"]),
        ("no pre", ["tokenizer.ggml.pre is missing", "convert the model again"]),
        ("merge", ["merge 1 is 'b c'", "merge 2 is 'ab'"]),
        ("merges", ["merges is not a list"]),
        ("types", ["4 tokens but 1 token types"]),
        ("type", ["token_type 1 is 7, one of 0 to 6", "token_type 2 is -1"]),
        ("duplicate", ["token 'a' has ids 0 and 1"]),
        ("eos id", ["eos_token_id is 4", "bos_token_id is 100", "below 4"]),
        ("no bos", ["add_bos_token is true, but there is no bos_token_id"]),
        ("flag", ["add_bos_token is 'yes'"]),
        ("scores", ["needs tokenizer.ggml.scores"]),
        ("no unknown", ["'t5' vocabulary needs an unknown_token_id"]),
        ("no words", ["'bert' vocabulary needs an unknown_token_id"]),
    ],
)
def test_damaged_vocabulary_is_refused_with_its_fault(change, messages, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write_vocabulary(tmp_path / "a.gguf", change)).tokenizer()
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_token_of_undefined_type_is_a_normal_token(model, tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, 0, 0, 0]
    scores = [0.0, 0.0, 0.0, -2.0, -2.0, -1.0]
    files.add_vocabulary(writer, model, tokens, types, pre="gpt-2", merges=["a b"], scores=scores)
    files.finish(writer)
    tokenizer = open_checkpoint(tmp_path / "a.gguf").tokenizer()
    assert tokenizer.encode("abb", add_special_tokens=False)[-2:] == [5, 4]
    assert tokenizer.decode([5, 4]) == "abb"


@pytest.mark.parametrize(
    ("named", "others", "ends"),
    [
        ("<|endoftext|>", ["<|end|>", "<|assistant|>"], ["<|endoftext|>", "<|end|>"]),
        ("</s>", ["<|im_start|>", "<|im_end|>"], ["</s>", "<|im_end|>"]),
        ("<eos>", ["<end_of_turn>", "<EOT>"], ["<eos>", "<end_of_turn>", "<EOT>"]),
        (
            "<|end_of_text|>",
            ["<|eom_id|>", "<|eot_id|>"],
            ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
        ),
        ("<|return|>", ["<|end|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (
            "<|return|>",
            ["<|endoftext|>", "<|call|>", "<|end|>"],
            ["<|return|>", "<|endoftext|>", "<|call|>"],
        ),
        ("<|return|>", ["<|end|>"], ["<|return|>", "<|end|>"]),
    ],
)
def test_end_of_text_tokens_include_those_known_by_their_text(named, others, ends, tmp_path):
    writer = files.new_writer(tmp_path / "a.gguf")
    tokens = ["a", "b", "ab", named, *others]
    types = [*[TokenType.NORMAL] * 3, TokenType.CONTROL, *[TokenType.NORMAL] * len(others)]
    files.add_vocabulary(
        *(writer, "gpt2", tokens, types), pre="gpt-2", merges=["a b"], extra={"eos_token_id": 3}
    )
    files.finish(writer)
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    tokenizer = checkpoint.tokenizer()
    assert [tokenizer.id_to_token(i) for i in tokenizer.eos_token_ids] == ends
    assert checkpoint.generation.eos_token_ids == tokenizer.eos_token_ids
    assert tokenizer.special_token_ids >= set(tokenizer.eos_token_ids)
    assert tokenizer.decode([0, *tokenizer.eos_token_ids]) == "a"
    for end in ends:
        assert tokenizer.encode(f"a{end}") == [0, tokenizer.token_to_id(end)]


def test_file_without_a_vocabulary_opens_but_has_no_tokenizer(tmp_path):
    files.finish(files.new_writer(tmp_path / "a.gguf"))
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        checkpoint.tokenizer()


# Decoders of tokenizer.json files

WORDS = ("▁a", "▁▁b", "c", "<0x41>", "▁", " d", "é", "", "##s", "##", ".", "n't", "'", "do not")
BACKEND = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=""))


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.ByteLevel(),
        decoders.Sequence([decoders.ByteLevel()]),
        decoders.Fuse(),
        decoders.WordPiece(),
        decoders.WordPiece(prefix="▁", cleanup=False),
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("c", "▁c"), decoders.Metaspace()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=str,
)
def test_supported_decoders_equal_the_library(decoder):
    BACKEND.decoder = decoder
    table = token_table(BACKEND, token_decoding(BACKEND.decoder), 100)
    ours = Tokenizer(BACKEND, table.data, first_bytes=table.first)
    cases = [list(ids) for length in (1, 2, 3) for ids in product(range(14), repeat=length)]
    for ids in cases:
        # Skip texts that begin with a token without bytes (an empty word or a bare prefix).
        if table.data[ids[0]]:
            assert ours.decode(ids) == BACKEND.decode(ids), (ids, decoder)
    assert ours.decode([]) == BACKEND.decode([])


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.BPEDecoder()])
def test_decoders_that_depend_on_neighbouring_tokens_are_refused(decoder):
    with pytest.raises(UnsupportedDecoderError, match="not supported"):
        token_decoding(decoder)
