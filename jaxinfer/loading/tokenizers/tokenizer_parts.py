"""What every way of reading a tokenizer's files comes to, before the chat template is added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.tokenizers.token_bytes import TokenTable
from jaxinfer.text.tokenizer import Backend

MAX_TOKENS = 4_194_304  # the largest vocabularies in use have 262,144


class TokenizerParts(NamedTuple):
    """What encodes, every token's bytes, the special ids, and names of special tokens.

    `prefix` and `suffix` go around each text, beside what `backend` adds by itself.
    """

    backend: Backend
    table: TokenTable
    special: frozenset[int]
    named: Mapping[str, str]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a file in UTF-8; `CheckpointError` for anything else, or past `max_bytes`."""
    try:
        size = path.stat().st_size
        if size <= max_bytes:
            return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    raise too_large(path, size, max_bytes)


def too_large(path: Path, size: int, max_bytes: int) -> CheckpointError:
    return CheckpointError(f"{path}: {size:,} bytes are more than the limit of {max_bytes:,}")


def around(
    which: str,
    directory: Path,
    config: Mapping[str, Any],
    backend: Backend,
    named: Mapping[str, str],
    *,
    default: bool = False,
) -> tuple[int, ...]:
    """The token "bos" or "eos", as often as `tokenizer_config.json` puts it beside a text.

    `CheckpointError` where it asks for a token that has no name or no id.
    """
    key = f"add_{which}_token"
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise CheckpointError(f"{directory}: {key} is {value!r}, true or false is needed")
    name = named.get(f"{which}_token")
    token_id = None if name is None else backend.token_to_id(name)
    if not value:
        return ()
    if token_id is None:
        raise CheckpointError(f"{directory}: {key} is true, but there is no {which}_token")
    return (token_id,)
