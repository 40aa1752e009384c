"""Build a tokenizer from a Hugging Face directory.

The tokenizer is `tokenizer.json`; without one, a SentencePiece model (`sentencepiece_files.py`), or
`vocab.json` with `merges.txt`, or `vocab.txt` (`vocabulary_files.py`). `tokenizer_config.json`
adds tokens and names the special ones.

The post-processor of `tokenizer.json` adds the tokens around a text (BOS, EOS), and its
pre-tokenizer the space before it: `add_bos_token`, `add_eos_token` and `add_prefix_space` apply to
the older files only. transformers 5 does the same if `tokenizer_config.json` does not name a
model's class; if it names one, such as LlamaTokenizer, transformers takes only the vocabulary from
`tokenizer.json` and rebuilds the rest.

The chat template is `chat_template.jinja`, or else `chat_template.json`, or else the key in
`tokenizer_config.json`; of several named templates, it is "default". `clean_up_tokenization_spaces`
is not applied, because it changes text that a stream has already sent. The clean-up of a WordPiece
decoder is applied, because it depends on one token only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from absl import logging

from jaxinfer.loading.checkpoint import CheckpointError, GenerationDefaults, read_json_object
from jaxinfer.loading.tokenizers import sentencepiece_files, vocabulary_files
from jaxinfer.loading.tokenizers.token_bytes import (
    UnsupportedDecoderError,
    token_decoding,
    token_table,
)
from jaxinfer.loading.tokenizers.tokenizer_parts import (
    MAX_TOKENS,
    TokenizerParts,
    affix_ids,
    read_text,
    too_large,
)
from jaxinfer.text.tokenizer import SpecialTokens, Tokenizer

MAX_TOKENIZER_BYTES = 256 * 2**20  # the largest tokenizer.json in use has 34 MB
MAX_TEMPLATE_BYTES = 2**20  # the largest in use have 30 KB
MAX_SHOWN = 5
MAX_ID_DIGITS = 10  # Python refuses to read numbers of thousands of digits
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
    """Build the tokenizer of `directory`, with the EOS and BOS ids of `defaults` if it has any.

    Raises `CheckpointError` if there are no tokenizer files, if one is damaged, or if the decoder
    cannot decode token by token.
    """
    config = _read_config(directory / "tokenizer_config.json")
    parts = _read_parts(directory, config)
    ids = {
        name: token_id
        for name, text in parts.named.items()
        if (token_id := parts.backend.token_to_id(text)) is not None
    }
    bos = defaults.bos_token_id if defaults.bos_token_id is not None else ids.get("bos_token")
    eos = defaults.eos_token_ids
    if not eos and "eos_token" in ids:
        eos = (ids["eos_token"],)
    special = SpecialTokens(
        ids=parts.special,
        eos_ids=eos,
        bos_id=bos,
        prefix_ids=parts.prefix,
        suffix_ids=parts.suffix,
        named=parts.named,
    )
    return Tokenizer(
        parts.backend,
        parts.table.data,
        first_bytes=parts.table.first,
        special=special,
        chat_template=_chat_template(directory, config),
    )


def _read_config(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _read_parts(directory: Path, config: Mapping[str, Any]) -> TokenizerParts:
    """Read the tokenizer from the first kind of files that exists."""
    named = {
        name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None
    }
    path = directory / "tokenizer.json"
    if path.is_file():
        return _backend_parts(path, _load_backend(path), config, named)
    model_type = _read_config(directory / "config.json").get("model_type")
    kind = vocabulary_files.tokenizer_class(config, model_type)
    for name in sentencepiece_files.NAMES:
        if (path := directory / name).is_file():
            _check_size(path)
            extra = sentencepiece_files.ExtraTokens(
                listed=_listed_by_id(directory, config),
                special=lambda names: _special_tokens(config, names),
            )
            return sentencepiece_files.from_sentencepiece(path, config, kind, named, extra)
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        read, path = vocabulary_files.from_vocab_json, directory / "vocab.json"
    elif (directory / "vocab.txt").is_file():
        read, path = vocabulary_files.from_vocab_txt, directory / "vocab.txt"
    else:
        raise CheckpointError(
            f"{directory}: has no tokenizer.json, nor {' or '.join(sentencepiece_files.NAMES)}, "
            "vocab.json with merges.txt, or vocab.txt; copy them from the model's repository, or "
            "pass token ids"
        )
    backend, named = read(directory, config, kind, named)
    parts = _backend_parts(path, backend, config, named)
    if backend.post_processor is not None:  # it adds the tokens around BERT's and RoBERTa's texts
        return parts
    return parts._replace(
        prefix=affix_ids("bos", directory, config, backend, named),
        suffix=affix_ids("eos", directory, config, backend, named),
    )


def _backend_parts(
    path: Path,
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    named: Mapping[str, str],
) -> TokenizerParts:
    """Return the parts of a backend that was read from `path`, with the tokens of `config`."""
    _add_tokens(path.parent, backend, config, named)
    try:
        table = token_table(backend, token_decoding(backend.decoder), MAX_TOKENS)
    except UnsupportedDecoderError as error:
        raise CheckpointError(
            f"{path}: {error} (byte-level, SentencePiece-like and WordPiece decoders are)"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return TokenizerParts(backend, table, frozenset(special), named)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    _check_size(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The library raises plain Exception for every kind of damage.
    except Exception as error:
        raise CheckpointError(f"{path}: not a valid tokenizer.json ({error})") from error
    # Truncation and padding are settings of training and embedding pipelines, not of a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_size(path: Path) -> None:
    if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise too_large(path, size, MAX_TOKENIZER_BYTES)


def _add_tokens(
    directory: Path,
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    named: Mapping[str, str],
) -> None:
    """Add the tokens that the other files list and `tokenizer.json` does not."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    # Sorted by id, because a token that is new to the vocabulary gets the next free id.
    listed = dict(sorted(_listed_by_id(directory, config).items(), key=lambda item: item[0]))
    new: list[tokenizers.AddedToken] = []
    for token in listed.values():
        if token.content not in known:
            token.special = token.special or token.content in named.values()
            known[token.content] = token
            new.append(token)
    # In one call: the library rebuilds its search at each call (4,000 calls take 4 s).
    backend.add_tokens(new)
    special: list[tokenizers.AddedToken] = []
    for token in _special_tokens(config, named):
        # A known token keeps its options, but becomes special.
        token = known.setdefault(token.content, token)
        token.special = True
        special.append(token)
    backend.add_special_tokens(special)
    _warn_about_other_ids(directory, backend, listed)


def _warn_about_other_ids(
    directory: Path, backend: tokenizers.Tokenizer, listed: Mapping[int, tokenizers.AddedToken]
) -> None:
    """Warn about added tokens whose ids differ from the stated ones.

    transformers accepts such files silently, and gives the tokens the same ids as this reader.
    """
    others = [
        f"{token.content!r} has id {actual}, not {index}"
        for index, token in listed.items()
        if (actual := backend.token_to_id(token.content)) != index
    ]
    if others:
        logging.warning(
            "%s: ids of added tokens differ from the stated ones (%s%s): a token may get the "
            "embedding of another one",
            directory,
            "; ".join(others[:MAX_SHOWN]),
            f"; and {len(others) - MAX_SHOWN} more" if len(others) > MAX_SHOWN else "",
        )


def _listed_by_id(directory: Path, config: Mapping[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of `added_tokens.json`, updated with `added_tokens_decoder`."""
    path = directory / "added_tokens.json"
    listed = sentencepiece_files.read_added_tokens(path) if path.is_file() else {}
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or not all(map(_is_id, entries)):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: added_tokens_decoder is not an object of "
            "token ids"
        )
    for index, entry in entries.items():
        if (token := _added_token(entry)) is not None:
            listed[int(index)] = token
    if listed and max(listed) >= MAX_TOKENS:
        raise CheckpointError(
            f"{directory}: added token id {max(listed):,} is not below the limit of {MAX_TOKENS:,}"
        )
    return listed


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS


def _special_tokens(
    config: Mapping[str, Any], named: Mapping[str, str]
) -> Iterator[tokenizers.AddedToken]:
    """Yield the named special tokens, then the extra ones, with the options in `config`."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    stated = {name: config.get(name) for name in named}
    for value in (*(stated[name] or text for name, text in named.items()), *extra):
        token = _added_token(value if isinstance(value, dict) else {"content": value})
        if token is not None:
            token.special = True
            yield token


def _added_token(entry: Any) -> tokenizers.AddedToken | None:
    """Return a token given as an object, or None for anything else."""
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    options = {flag: entry[flag] for flag in flags if isinstance(entry.get(flag), bool)}
    return tokenizers.AddedToken(entry["content"], **options) if entry["content"] else None


def _token_text(value: Any) -> str | None:
    """Return the text of a token given as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    if (directory / "chat_template.jinja").is_file():
        return read_text(directory / "chat_template.jinja", MAX_TEMPLATE_BYTES)
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
