"""API keys, from a file that the operator maintains.

The file has one key a line, bare or as `name:key`; empty lines and lines that begin with `#` are
skipped. A presented key is compared as a SHA-256 digest, in constant time, with every known key, so
that the response time reveals nothing about them. The keys themselves are not stored.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from jaxinfer.options import ConfigError

MIN_KEY_LEN = 8  # characters; a shorter key is a typing error, or can be guessed


class ApiKeys:
    """The accepted keys, each with the name that appears in the log."""

    def __init__(self, keys: Iterable[tuple[str, str]]):
        """`keys` are (name, key)."""
        self._names_by_digest = {_digest(key): name for name, key in keys}

    @classmethod
    def from_file(cls, path: str | Path) -> ApiKeys:
        """Read a file of keys; raises `ConfigError` with all its problems, without showing a key.

        A key without a name is named `line-` and the number of its line.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"API keys file {path}: cannot be read ({error})") from error
        problems: list[str] = []
        names_by_key: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            before, colon, after = line.partition(":")
            name, key = (before.strip(), after.strip()) if colon else (f"line-{number}", line)
            problem = _problem(name, key, names_by_key)
            if problem:
                problems.append(f"line {number}: {problem}")
            else:
                names_by_key[key] = name
        if not problems and not names_by_key:
            problems.append("it contains no key; write one a line, or name:key")
        if problems:
            raise ConfigError(f"API keys file {path}: {'; '.join(problems)}")
        return cls((name, key) for key, name in names_by_key.items())

    def __len__(self) -> int:
        return len(self._names_by_digest)

    def name_of(self, token: str | None) -> str | None:
        """The name of the key `token`; None for an unknown key."""
        digest = _digest(token or "")
        found = None
        for known, name in self._names_by_digest.items():  # no early exit: constant time
            if hmac.compare_digest(known, digest):
                found = name
        return found


def bearer_token(authorization: str | None) -> str | None:
    """The token in the value of an `Authorization: Bearer TOKEN` header; None if it has none."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _problem(name: str, key: str, names_by_key: dict[str, str]) -> str | None:
    if not name or not name.isprintable():
        return "the name before the colon is empty or not printable"
    if not key:
        return "there is no key after the colon"
    if not all("!" <= char <= "~" for char in key):
        return "a key may contain only printable ASCII characters, without spaces"
    if len(key) < MIN_KEY_LEN:
        return f"the key has {len(key)} characters; it needs at least {MIN_KEY_LEN}"
    if key in names_by_key:
        return f"the key repeats that of {names_by_key[key]!r}"
    if name in names_by_key.values():
        return f"the name {name!r} is used by an earlier line"
    return None
