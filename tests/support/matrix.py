"""Choosing the cases of a test matrix that run.

A test marked `matrix` repeats one check over many cases. `make test` runs one case of each matrix,
CI adds a tenth of the others, another tenth for each commit, and `make test-all` runs them all.
`matrix(by=("backend", "dtype"))` keeps cases until each value of each parameter named has run
once, so that no value goes untested. A test marked `ci` takes long and proves little that a
newcomer could break: CI and `make test-all` run it, `make test` does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import pytest

ALL, FIRST = "all", "first"
NUM_SHARES = 10


def is_in_share(case_id: str, seed: str) -> bool:
    """Whether a case belongs to the tenth of all cases that `seed` chooses."""
    digest = hashlib.sha256(f"{seed}:{case_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % NUM_SHARES == 0


def named_values(item: pytest.Item) -> list[Hashable] | None:
    """What a test case covers of its matrix, or None for a case that always runs.

    Without `by` that is the test function alone; else one entry for each parameter named.
    """
    marker = item.get_closest_marker("matrix")
    if marker is None:
        return None
    names = marker.kwargs.get("by", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    params = item.callspec.params if hasattr(item, "callspec") else {}  # type: ignore[attr-defined]
    unknown = [name for name in names if name not in params]
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: matrix(by=...) names no parameter: {unknown}")
    function = item.nodeid.partition("[")[0]
    return [(function, name, repr(params[name])) for name in names] or [function]


def choose(
    items: Sequence[pytest.Item], choice: str
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the collected cases into those to run and those to leave out.

    `choice` is "all", "first" (cases until each value named by `by` has run, and no test marked
    `ci`), or a seed: the same, the tests marked `ci`, and the tenth of the others that the seed
    chooses.
    """
    if choice == ALL:
        return list(items), []
    seen: set[Hashable] = set()
    chosen, left_out = [], []
    for item in items:
        if choice == FIRST and item.get_closest_marker("ci"):
            left_out.append(item)
            continue
        values = named_values(item)
        is_new = values is None or not seen.issuperset(values)
        seen.update(values or ())
        runs = is_new or (choice != FIRST and is_in_share(item.nodeid, choice))
        (chosen if runs else left_out).append(item)
    return chosen, left_out
