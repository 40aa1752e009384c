"""The parts of a tokenizer that its files give, without the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.tokenizers.token_bytes import TokenTable
from jaxinfer.text.tokenizer import Backend

MAX_TOKENS = 4_194_304  # the largest vocabularies in use have 262,144


class TokenizerParts(NamedTuple):
    """A backend, the bytes of every token, the special ids, and the named special tokens.

    `prefix` and `suffix` are added around each text, besides the tokens that `backend` adds itself.
    """

    backend: Backend
    table: TokenTable
    special: frozenset[int]
    named: Mapping[str, str]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


def read_text(path: Path, max_bytes: int) -> str:
    """Read a UTF-8 text file.

    Raises `CheckpointError` for another encoding, and for a file of more than `max_bytes`.
    """
    try:
        size = path.stat().st_size
        if size <= max_bytes:
            return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    raise too_large(path, size, max_bytes)


def too_large(path: Path, size: int, max_bytes: int) -> CheckpointError:
    """Make the error for a file that is larger than the limit."""
    return CheckpointError(
        f"{path}: {size:,} bytes are more than the limit of {max_bytes:,}; this is not a usual "
        "tokenizer's file, fetch it again"
    )


def affix_ids(
    which: str,
    directory: Path,
    config: Mapping[str, Any],
    backend: Backend,
    named: Mapping[str, str],
    *,
    default: bool = False,
) -> tuple[int, ...]:
    """Return the token `which` ("bos" or "eos") if `tokenizer_config.json` adds it to a text.

    Raises `CheckpointError` if it adds a token that has no name or no id.
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
