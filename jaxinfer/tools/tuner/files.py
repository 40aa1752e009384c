"""Choose tilings from measurements and write them to `kernels/tuned/<device kind>.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MIN_GAIN = 0.03  # a smaller gain over the current tiling is noise


def figure(tried: Row) -> float | None:
    """The measured seconds of a tiling, or else the estimated ones."""
    return tried.get("seconds", tried.get("estimate"))


def best_tiling(rows: Sequence[Row]) -> Row | None:
    """The best tiling over all cases of one key, if it beats the current one by `MIN_GAIN`.

    Figures are relative to the current tiling's, so that a long case does not outweigh a short one;
    a tiling that fails in one case is excluded. None means to keep the current tiling, or that
    there is nothing to compare.
    """
    relative: dict[str, list[float]] = {}
    for row in rows:
        current = next((figure(t) for t in row["tried"] if t["tiling"] is None), None)
        if not current:
            return None
        for tried in row["tried"]:
            if tried["tiling"] is not None and (seconds := figure(tried)):
                name = json.dumps(tried["tiling"], sort_keys=True)
                relative.setdefault(name, []).append(seconds / current)
    means = {
        name: math.exp(sum(map(math.log, shares)) / len(shares))
        for name, shares in relative.items()
        if len(shares) == len(rows)
    }
    if not means:
        return None
    best = min(means, key=lambda name: means[name])
    if means[best] > 1 - MIN_GAIN:
        return None
    return {"tiling": json.loads(best), "share": means[best]}


def group_by_key(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group measured rows by operator/backend and key."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] == "measured":
            place = f"{row['operator']}/{row['backend']}", row["key"]
            groups.setdefault(place, []).append(row)
    return groups


def write_tilings(path: Path, chosen: dict[tuple[str, str], Row]) -> None:
    """Write the chosen tilings to a device's file; entries of other keys are kept."""
    known: dict[str, dict[str, Any]] = {}
    if path.exists():
        known = json.loads(path.read_text("utf-8"))
    for (operator, key), winner in chosen.items():
        known.setdefault(operator, {})[key] = winner["tiling"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=4, sort_keys=True) + "\n", "utf-8")
