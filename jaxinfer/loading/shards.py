"""The numbered files of one model: `NAME-00001-of-0000N` with the suffix of a format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from jaxinfer.loading.checkpoint import CheckpointError

MAX_SHARDS = 1_000
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.safetensors)")


class ShardSet(NamedTuple):
    """What the names of all shards of a model have in common."""

    stem: str
    count: int
    suffix: str

    def names(self) -> list[str]:
        """Of its files, in order."""
        numbers = range(1, self.count + 1)
        return [f"{self.stem}-{i:05d}-of-{self.count:05d}{self.suffix}" for i in numbers]


def shard_set(path: Path) -> ShardSet | None:
    """The set that a file is one of by its name; None: of none. `CheckpointError` for more than
    `MAX_SHARDS`, each of which would be missed by name."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return None
    count = int(match["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise CheckpointError(f"{path}: claims {count:,} shards; 1 to {MAX_SHARDS:,} are possible")
    return ShardSet(match["stem"], count, match["suffix"])
