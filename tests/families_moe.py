"""Cases of the mixtures of experts (see `family_bench.py`)."""

from __future__ import annotations

from family_bench import FamilyCase

CASES: dict[str, FamilyCase] = {}
