"""Read a file of prompts or texts: one JSON string on each line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHOWN = 20  # problems that an error lists


def read_json_strings(path: str) -> list[str]:
    """Read the strings of a file, "-" for stdin; blank lines are skipped.

    Raises `ValueError` that names every line that is not a JSON string.
    """
    try:
        raw = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from error
    strings, problems = [], []
    for number, line in enumerate(raw.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            problems.append(f"line {number} is not JSON ({error})")
            continue
        if isinstance(value, str):
            strings.append(value)
        else:
            problems.append(f"line {number} holds a JSON {type(value).__name__}, not a string")
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems[:SHOWN])}")
    return strings
