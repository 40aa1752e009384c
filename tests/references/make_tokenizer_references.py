"""Train the tests' tiny tokenizers, and record the results of Hugging Face transformers for them.

    python tests/references/make_tokenizer_references.py [--train]

writes into tests/references/tokenizers/ one directory for each kind of tokenizer (only with
`--train`, because some trainers, such as WordPiece's, break ties differently from run to run, which
changes the records), and `difficult_texts.json`: for every kind and every text of
`tests/support/difficult_texts.py`, the number of ids and short digests of the ids and of the
decoded text, without and with special tokens. Nothing is written if jaxinfer differs from
transformers. SentencePiece models for which transformers is known to differ from the
`sentencepiece` library (`tests/support/tiny_tokenizers.py` lists them) are recorded from that
library. Needs transformers.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from absl import app, flags, logging
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from jaxinfer.loading.tokenizers.pretokenizers import SPLIT_RULES
from tests.support import chat_templates as chats
from tests.support import tiny_tokenizers as tiny
from tests.support.difficult_texts import CORPUS, DIFFICULT_TEXTS

FLAGS = flags.FLAGS
flags.DEFINE_bool("train", False, "Also retrain the tokenizers.")

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<mask>")
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# A few rules of NFKC, so that a model's character map has hundreds of bytes and not 240 kB.
RULES = {
    "ﬁ": "fi", "\uff0c": ",", "\uff11": "1", "\uff12": "2", "\u3000": " ", "\t": " ", "\n": " ",
    "①": "1", "²": "2", "e\u0301": "é", "ｶ\uff9e": "ガ", "\u200b": " ", "\u00ad": "",
    "\u212b": "\u00c5",
}  # fmt: skip


def write(name: str, config: dict[str, Any], model_type: str, backend: Tokenizer | None) -> Path:
    """Write a directory with both configs and, if there is a `backend`, a `tokenizer.json`."""
    folder = tiny.FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    if backend is not None:
        stored = json.loads(backend.to_str())
        text = json.dumps(stored, ensure_ascii=False, separators=(",", ":"))
        (folder / "tokenizer.json").write_text(text + "\n", "utf-8")
    return folder


def added(*, mask: bool = True) -> list[tokenizers.AddedToken]:
    """Make added tokens with every option."""
    rest = [
        tokenizers.AddedToken("<tool>", normalized=False),
        tokenizers.AddedToken("hello", normalized=True, single_word=True),
        tokenizers.AddedToken("##ing", normalized=False, rstrip=True),
    ]
    return [tokenizers.AddedToken("<mask>", special=True, lstrip=True), *rest] if mask else rest


def byte_level(rule: str, vocab_size: int = 500) -> Tokenizer:
    """Train a byte-level BPE tokenizer with the split rule of this name."""
    backend = Tokenizer(models.BPE(ignore_merges=SPLIT_RULES[rule].whole_words_first))
    backend.pre_tokenizer = SPLIT_RULES[rule].pre_tokenizer()
    if rule == "gpt-2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    normalizer = SPLIT_RULES[rule].normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL[:5]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def make_byte_level() -> None:
    """Write three byte-level tokenizers, and three in the older files."""
    gpt2 = byte_level("gpt-2")
    folder = write("files_gpt2", {"tokenizer_class": "GPT2Tokenizer"}, "gpt2", None)
    gpt2.model.save(str(folder))
    roberta = {"tokenizer_class": "RobertaTokenizer", "pad_token": "<|im_start|>"}
    roberta |= {"add_prefix_space": True, "unk_token": "<|endoftext|>"}
    roberta["mask_token"] = {  # pyright: ignore[reportArgumentType]
        "__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False,
        "normalized": False, "single_word": False, "special": True,
    }  # fmt: skip
    gpt2.model.save(str(write("files_roberta", roberta, "roberta", None)))
    gpt2.add_tokens(added())
    write("byte_level_gpt2", {"eos_token": "<|endoftext|>", **FAST}, "gpt2", gpt2)
    llama3 = byte_level("llama-bpe")
    llama3.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 3)]),
        ]
    )
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    write("byte_level_llama3", {**names, **FAST}, "llama", llama3)
    qwen2 = byte_level("qwen2")
    write("byte_level_qwen2", {"eos_token": "<|im_end|>", **FAST}, "qwen3", qwen2)
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    qwen2.model.save(str(write("files_qwen2", config, "qwen3", None)))


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def pieces_of(kind: str, **options: Any) -> tuple[bytes, list[tuple[str, float]]]:
    """Train a SentencePiece model; return it and its pieces with their scores."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type=kind,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(model.piece_size())
    return out.getvalue(), [(model.id_to_piece(i), model.get_score(i)) for i in ids]


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def make_sentencepiece() -> None:
    """Write SentencePiece models, and `tokenizer.json` files converted from such models."""
    raw, pieces = pieces_of("bpe", vocab_size=700, byte_fallback=True, **IDENTITY)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
    listed = {
        "700": {"content": "<tool>", "lstrip": False, "rstrip": True, "special": False},
        "701": {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "special": True},
    }
    for entry in listed.values():
        entry |= {"normalized": False, "single_word": False}
    folder = write("model_bpe", {**config, "added_tokens_decoder": listed}, "llama", None)
    (folder / "tokenizer.model").write_bytes(raw)
    make_llama(pieces)
    rules = tiny.FOLDER / "rules.tsv"
    codes = lambda text: " ".join(f"{ord(char):X}" for char in text)
    rules.write_text("".join(f"{codes(old)}\t{codes(new)}\n" for old, new in RULES.items()))
    raw, _ = pieces_of("unigram", vocab_size=460, normalization_rule_tsv=str(rules))
    rules.unlink()
    folder = write("model_unigram", {**FAST, "add_eos_token": True}, "llama", None)
    (folder / "tokenizer.model").write_bytes(raw)
    make_unigram(raw)


def make_llama(pieces: list[tuple[str, float]]) -> None:
    """Write BPE with byte fallback: with a space before each text, and without, as Gemma's."""
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    ranked = sorted(
        (-score, ids[whole], whole[:cut], whole[cut:])
        for whole, score in pieces[259:]
        for cut in range(1, len(whole))
        if whole[:cut] in ids and whole[cut:] in ids
    )
    merges = [(left, right) for _, _, left, right in ranked]
    for name in ("bpe_llama", "bpe_gemma"):
        model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(model)
        replace = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if name == "bpe_llama":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
            backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        else:
            backend.normalizer = replace
            backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
            backend.decoder = decoders.Sequence(steps)
        backend.post_processor = processors.TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", 1)]
        )
        backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
        backend.add_tokens(added())
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        write(name, {**names, **FAST}, "llama", backend)


def make_unigram(raw: bytes) -> None:
    """Write Unigram models: one with a character map, as T5's, and one with byte fallback."""
    model = sentencepiece.SentencePieceProcessor(model_proto=raw)
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.piece_size())]
    charsmap = tiny.charsmap_of(raw)
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", 2)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(added())
    names = {"eos_token": "</s>", "unk_token": "<unk>"}
    write("unigram_t5", {**names, **FAST}, "t5", backend)
    _, pieces = pieces_of("unigram", vocab_size=700, byte_fallback=True, **IDENTITY)
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    write("unigram_bytes", {**names, **FAST}, "llama", backend)


def make_words() -> None:
    """Write BERT's WordPiece, lower-cased and cased, its older file, and a word-level tokenizer."""
    for name, lowercase in (("wordpiece_uncased", True), ("wordpiece_cased", False)):
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=700, special_tokens=list(BERT_SPECIAL), show_progress=False
        )
        backend.train_from_iterator(CORPUS, trainer)
        ids = backend.get_vocab()
        if lowercase:
            words = sorted(ids, key=ids.__getitem__)
            folder = write("files_bert", {"tokenizer_class": "BertTokenizer"}, "bert", None)
            (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), "utf-8")
        backend.post_processor = processors.TemplateProcessing(
            single=["[CLS]", "$A", "[SEP]"], special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
        write(
            name, {**names, "pad_token": "[PAD]", "mask_token": "[MASK]", **FAST}, "bert", backend
        )
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=300, special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(added())
    write("wordlevel", {"unk_token": "[UNK]", **FAST}, "llama", backend)


def rows_of(name: str) -> list[list[Any]]:
    """Make the records of transformers' tokenizer, which must equal ours except for `DIFFERS`."""
    peer = transformers.AutoTokenizer.from_pretrained(tiny.FOLDER / name)
    ours = tiny.directory_tokenizer(name)
    rows, differing = [], []
    for text in DIFFICULT_TEXTS:
        ids = peer.encode(text)
        decoded = [peer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
        if ours.encode(text) != ids:
            differing.append(text)
            if name not in tiny.DIFFERS:
                raise ValueError(f"{name}: other ids than transformers for {text[:60]!r}")
        rows.append(tiny.record(ids, *decoded))
    logging.info("%-20s %d texts, %d differ", name, len(rows), len(differing))
    return tiny.records(ours) if name in tiny.DIFFERS else rows


def chat_rows(name: str) -> list[Any]:
    """Make the records of transformers for a chat template, which must equal ours."""
    with tempfile.TemporaryDirectory() as folder:
        directory, ours = tiny.with_template(name, Path(folder))
        peer = transformers.AutoTokenizer.from_pretrained(directory)
    encode = partial(peer.apply_chat_template, return_dict=False)
    rows = [tiny.chat_row(encode, *case) for case in chats.cases()]
    for case, row in zip(chats.cases(), rows, strict=True):
        if tiny.chat_row(ours.encode_chat, *case) != row:
            raise ValueError(f"chat {name}: other ids than transformers for {case}")
    logging.info("chat %-15s %d cases, %d refused", name, len(rows), rows.count(None))
    return rows


def main(argv: Sequence[str]) -> None:
    """Write the references."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    transformers.utils.logging.set_verbosity_error()
    if FLAGS.train:
        make_byte_level()
        make_sentencepiece()
        make_words()
    versions = {
        package.__name__: package.__version__
        for package in (tokenizers, transformers, sentencepiece)
    }
    lines = [f' "versions": {json.dumps(versions)}']
    lines += [f' "{name}": {json.dumps(rows_of(name))}' for name in tiny.DIRECTORIES]
    lines += [f' "chat {name}": {json.dumps(chat_rows(name))}' for name in chats.TEMPLATES]
    (tiny.FOLDER / "difficult_texts.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    app.run(main)
