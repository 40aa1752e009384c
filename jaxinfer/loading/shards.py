"""Names of a model's shards: `NAME-00001-of-0000N` with the suffix of a format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from jaxinfer.loading.checkpoint import CheckpointError

MAX_SHARDS = 1_000
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.safetensors)")


class ShardSet(NamedTuple):
    """The common parts of the names of a model's shards."""

    stem: str
    count: int
    suffix: str

    def names(self) -> list[str]:
        """List the names of the files, in order."""
        numbers = range(1, self.count + 1)
        return [f"{self.stem}-{i:05d}-of-{self.count:05d}{self.suffix}" for i in numbers]


def shard_set(path: Path) -> ShardSet | None:
    """Return the set of shards to which a file belongs by its name, or None.

    Raises `CheckpointError` for more than `MAX_SHARDS` shards, since an error would name each
    missing one.
    """
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return None
    count = int(match["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise CheckpointError(f"{path}: claims {count:,} shards; 1 to {MAX_SHARDS:,} are allowed")
    return ShardSet(match["stem"], count, match["suffix"])
