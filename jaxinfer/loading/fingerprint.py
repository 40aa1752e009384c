"""Compute a short fingerprint of a checkpoint's weights without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.loading.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    CheckpointError,
    read_json_object,
)
from jaxinfer.loading.gguf import shard_paths
from jaxinfer.loading.huggingface import weight_files

SAMPLE_BYTES = 16 * 2**10
NUM_SAMPLES = 256  # per file: 4 MiB in all, one sample every 20 MB in a shard of 5 GB


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return 16 hexadecimal digits: BLAKE2b of the files' sizes and of evenly spaced samples.

    Two models of the same shape that differ in every matrix, such as fine-tunes, have different
    fingerprints; two that differ in a few rows may have the same one. A converted checkpoint has
    the fingerprint of its source. Raises `CheckpointError` for a file that cannot be read.
    """
    path = checkpoint.path
    if checkpoint.restore is not None:
        manifest = path / MANIFEST_FILE
        known = read_json_object(manifest).get("fingerprint")  # older manifests have none
        return known if isinstance(known, str) else _digest([manifest])
    return _digest(weight_files(path) if path.is_dir() else shard_paths(path))


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        try:
            _add(digest, path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    stride = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
    with path.open("rb") as file:
        for offset in range(0, size, stride):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
