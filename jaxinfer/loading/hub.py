"""Download models from the Hugging Face hub, with `huggingface_hub` and its cache."""

from __future__ import annotations

import re
from pathlib import Path

from jaxinfer.loading.checkpoint import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# The files that a Hugging Face directory needs, including vocabularies of every kind. Pickled
# weights, weights of other frameworks, and unrelated text files are not downloaded.
ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
# Second copies of the weights in the publisher's own layout, and all subfolders.
IGNORE_PATTERNS = ["consolidated*", "original/*", "*/*"]
# The files of a sentence model that are in subfolders, which `IGNORE_PATTERNS` excludes.
SENTENCE_PATTERNS = ["*_Pooling/config.json"]


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form organisation/name."""
    return HUB_ID.fullmatch(source) is not None


def download(hub_id: str) -> Path:
    """Return the local snapshot of a hub model; download the files that are not in the cache.

    Raises `CheckpointError` if the hub cannot be reached or refuses access to the model.
    """
    # Imported here: it is slow to import, and local files do not need it.
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                hub_id, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS
            )
        )
        if (folder / "modules.json").is_file():
            snapshot_download(hub_id, allow_patterns=SENTENCE_PATTERNS)
        return folder
    # Its errors have no common base class: HTTP, cache, validation and socket errors are raised.
    except Exception as error:
        raise CheckpointError(
            f"{hub_id}: there is no such local path, and fetching it from the hub failed "
            f"({type(error).__name__}: {_first_line(error)}). If the name is right, check the "
            "network and, for a gated model, the token (HF_TOKEN). Local files, local directories "
            'and "demo" work without the hub.'
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
