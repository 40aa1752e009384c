"""The files that a newcomer reads first: few enough lines for one afternoon."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

MAX_LINES = 2_500  # not blank, over all files
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (\d+) \|", re.MULTILINE)


def listed() -> dict[str, int]:
    """The table of docs/design.md: lines by file."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = text.partition("## Where to begin reading")[2].partition("\n## ")[0]
    return {path: int(number) for path, number in ROW.findall(section)}


def count(path: str) -> int:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) for line in lines)


def test_reading_path_is_short():
    assert len(listed()) >= 11
    assert sum(map(count, listed())) <= MAX_LINES


def test_reading_path_states_the_lines_of_each_file():
    wrong = {
        path: (number, count(path))
        for path, number in listed().items()
        if not 0.9 * number <= count(path) <= 1.1 * number
    }
    assert not wrong, "docs/design.md states other numbers of lines"


def test_step_of_one_device_is_short_and_names_neither_pipeline_nor_sequence():
    text = (ROOT / "jaxinfer/execution/step.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert not re.search(r"import .*(pipeline|sequence|zigzag)", text)
