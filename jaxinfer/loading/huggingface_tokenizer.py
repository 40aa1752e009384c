"""A tokenizer out of a Hugging Face directory.

`tokenizer.json` is the tokenizer; `tokenizer_config.json` adds tokens and names the special ones.
What goes around a text (BOS, EOS) is the post-processor's of `tokenizer.json`: `add_bos_token` and
`add_eos_token` describe the older tokenizer files, and transformers 5 passes them over too. The
chat template is `chat_template.jinja`, else `chat_template.json`, else the key in
`tokenizer_config.json`; of several named ones, "default". `clean_up_tokenization_spaces` is not
applied: it changes text that a stream has already sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.loading.checkpoint import CheckpointError, GenerationDefaults, read_json_object
from jaxinfer.loading.token_bytes import UnsupportedDecoderError, spelling_of, token_table
from jaxinfer.tokenizer import Tokenizer

MAX_TOKENS = 4_194_304  # the largest vocabularies in use have 262,144
MAX_TOKENIZER_BYTES = 256 * 2**20  # the largest tokenizer.json in use has 34 MB
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def build_tokenizer(directory: Path, defaults: GenerationDefaults) -> Tokenizer:
    """The tokenizer of `directory`; `defaults` say which ids end an answer, if they say so.

    `CheckpointError` if there is no `tokenizer.json`, if a file is damaged, or for a decoder
    that cannot be followed token by token.
    """
    path = directory / "tokenizer.json"
    backend = _load_backend(path)
    config_path = directory / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.exists() else {}
    named = {
        name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None
    }
    _add_tokens(config_path, backend, config, named)
    try:
        spelling = spelling_of(backend.decoder)
        table = token_table(backend, spelling, MAX_TOKENS)
    except UnsupportedDecoderError as error:
        raise CheckpointError(
            f"{path}: {error} (byte-level and SentencePiece-like decoders are)"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error

    ids = {
        name: token_id
        for name, text in named.items()
        if (token_id := backend.token_to_id(text)) is not None
    }
    bos = defaults.bos_token_id if defaults.bos_token_id is not None else ids.get("bos_token")
    eos = defaults.eos_token_ids
    if not eos and "eos_token" in ids:
        eos = (ids["eos_token"],)
    return Tokenizer(
        backend,
        table,
        special_token_ids={
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        },
        eos_token_ids=eos,
        bos_token_id=bos,
        strips_leading_space=spelling.strips_leading_space,
        chat_template=_chat_template(directory, config),
        named_special_tokens=named,
    )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent}: holds no tokenizer.json; copy it from the model's repository (a "
            "sentencepiece tokenizer.model alone can be converted with transformers' "
            "AutoTokenizer and save_pretrained), or pass token ids"
        )
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise CheckpointError(
            f"{path}: {size:,} bytes are more than the limit of {MAX_TOKENIZER_BYTES:,}"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The library raises plain Exception for every kind of damage.
    except Exception as error:
        raise CheckpointError(f"{path}: not a valid tokenizer.json ({error})") from error
    # Settings of training and embedding pipelines; a prompt is neither cut nor padded unasked.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(
    path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add what `tokenizer_config.json` lists and `tokenizer.json` does not know as added."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in _listed_tokens(path, config):
        if token.content not in known:
            token.special = token.special or token.content in named.values()
            backend.add_tokens([token])
            known.add(token.content)
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    for text in [*named.values(), *(_token_text(item) for item in extra)]:
        if text and text not in known:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True)])
            known.add(text)


def _listed_tokens(path: Path, config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        raise CheckpointError(f"{path}: added_tokens_decoder is not an object of token ids")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    # By id, since a token new to the vocabulary takes the next free one.
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"]:
            options = {flag: entry[flag] for flag in flags if isinstance(entry.get(flag), bool)}
            yield tokenizers.AddedToken(entry["content"], **options)


def _token_text(value: Any) -> str | None:
    """The text of a token given as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    if (directory / "chat_template.jinja").is_file():
        try:
            return (directory / "chat_template.jinja").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{directory / 'chat_template.jinja'}: cannot be read ({error})"
            ) from error
    where = directory / "tokenizer_config.json"
    if (directory / "chat_template.json").is_file():
        where = directory / "chat_template.json"
        config = read_json_object(where)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{where}: chat_template is a {type(template).__name__}, not a text")
    return template
