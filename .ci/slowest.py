"""Print the slowest tests of JUnit reports, and how many tests each report has.

python .ci/slowest.py build/ci/main.xml build/ci/second.xml
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

NUM_SHOWN = 20


def main(paths: list[str]) -> None:
    cases: list[tuple[float, str]] = []
    for path in filter(Path.exists, map(Path, paths)):
        suite = ElementTree.parse(path).getroot().iter("testcase")
        own = [(float(c.get("time", 0)), f"{c.get('classname')}::{c.get('name')}") for c in suite]
        print(
            f"== {path.stem}: {len(own):,} tests, {sum(s for s, _ in own):,.0f} s over all workers"
        )
        cases += [(seconds, f"{name}  ({path.stem})") for seconds, name in own]
    print(f"== the {NUM_SHOWN} slowest tests")
    for seconds, name in sorted(cases, reverse=True)[:NUM_SHOWN]:
        print(f"{seconds:8.1f} s  {name[:150]}")


if __name__ == "__main__":
    main(sys.argv[1:])
