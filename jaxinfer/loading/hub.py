"""Models by hub id, through `huggingface_hub` and its cache."""

from __future__ import annotations

import re
from pathlib import Path

from jaxinfer.loading.checkpoint import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# What a Hugging Face directory needs, vocabularies of every kind among it; weights in pickles and
# in other frameworks' formats stay, and so do texts that are none of ours.
ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
# Second copies of the weights, in the publisher's own layout.
IGNORE_PATTERNS = ["consolidated*", "original/*", "*/*"]
# What a sentence model has in folders, which no pattern of the above lets in alone.
SENTENCE_PATTERNS = ["*_Pooling/config.json"]


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form organisation/name."""
    return HUB_ID.fullmatch(source) is not None


def download(hub_id: str) -> Path:
    """The local snapshot of a hub model, fetched as far as it is not in the hub's cache.

    `CheckpointError` if the hub cannot be reached or does not give the model out.
    """
    # Imported here: it takes a while, and local files need none of it.
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
    # Its errors share no base class: HTTP, cache, validation and socket errors come through.
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
