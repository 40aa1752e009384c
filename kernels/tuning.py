"""Tilings: each backend has a frozen dataclass with a heuristic; measured values are data.

`kernels/tuned/<device kind>.json` holds what `jaxinfer tune` found on a device, by
operator, backend and key (the shapes and types that the choice depends on, as text):

    {"paged_attention/gpu": {
        "T=64 R=64 N=32 K=8 H=128 B=64 bfloat16 bfloat16": {"block": 128, "num_warps": 8}}}

A backend calls `tuned(heuristic(...), "paged_attention/gpu", key)`. The heuristic decides what a
file does not list; a field that the dataclass lacks is an error, so that stale files are noticed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any, TypeVar

from jaxinfer.kernels.dispatch import device_kind

FOLDER = Path(__file__).parent / "tuned"

TilingT = TypeVar("TilingT")


def file_of(kind: str) -> Path:
    """Return the file with the tilings of a kind of device: `NVIDIA H200` -> `nvidia_h200.json`."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_") + ".json")


@functools.lru_cache
def load(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return operator/backend -> key -> fields; empty where there is no such file.

    Raises `ValueError` for a file that holds anything else. Each file is read once a process.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}; tune again") from error
    is_table = lambda x: isinstance(x, dict)
    if not is_table(found) or not all(
        is_table(keys) and all(map(is_table, keys.values())) for keys in found.values()
    ):
        raise ValueError(f"{path.name} is no table of operator, key and fields; tune again")
    return found


def tuned(heuristic: TilingT, operator: str, key: str) -> TilingT:
    """Return `heuristic` with the fields that were measured for this device, operator and key.

    Raises `ValueError` for a file whose fields the tiling does not have.
    """
    path = file_of(device_kind())
    found = load(path).get(operator, {}).get(key)
    if not found:
        return heuristic
    try:
        return dataclasses.replace(heuristic, **found)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path.name}, {operator}, {key!r}: {error}; tune again") from error
