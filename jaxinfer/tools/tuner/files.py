"""From the figures of cases to the entries of `kernels/tuned/<device kind>.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LEAST_GAIN = 0.03  # what a tiling has to win over today's; less is noise


def figure(tried: Row) -> float | None:
    """Seconds measured, or else estimated."""
    return tried.get("seconds", tried.get("estimate"))


def best_tiling(rows: Sequence[Row]) -> Row | None:
    """The tiling that is best over all cases of one key, if it beats today's by `LEAST_GAIN`.

    A case's figures count relative to today's, so that a long case does not outweigh a short one;
    a tiling that fails in one case is out. None: keep today's, or there is nothing to compare.
    """
    relative: dict[str, list[float]] = {}
    for row in rows:
        today = next((figure(t) for t in row["tried"] if t["tiling"] is None), None)
        if not today:
            return None
        for tried in row["tried"]:
            if tried["tiling"] is not None and (seconds := figure(tried)):
                name = json.dumps(tried["tiling"], sort_keys=True)
                relative.setdefault(name, []).append(seconds / today)
    means = {
        name: math.exp(sum(map(math.log, shares)) / len(shares))
        for name, shares in relative.items()
        if len(shares) == len(rows)
    }
    if not means:
        return None
    best = min(means, key=lambda name: means[name])
    if means[best] > 1 - LEAST_GAIN:
        return None
    return {"tiling": json.loads(best), "share": means[best]}


def group_by_key(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Measured rows by operator/backend and key."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] == "measured":
            place = f"{row['operator']}/{row['backend']}", row["key"]
            groups.setdefault(place, []).append(row)
    return groups


def write_tilings(path: Path, chosen: dict[tuple[str, str], Row]) -> None:
    """Put the chosen tilings into a device's file; what it holds of other keys stays."""
    known: dict[str, dict[str, Any]] = {}
    if path.exists():
        known = json.loads(path.read_text("utf-8"))
    for (operator, key), winner in chosen.items():
        known.setdefault(operator, {})[key] = winner["tiling"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=4, sort_keys=True) + "\n", "utf-8")
