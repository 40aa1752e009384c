"""Cases of DeepSeek-V2 and V3 (see `family_bench.py`)."""

from __future__ import annotations

from family_bench import FamilyCase

CASES: dict[str, FamilyCase] = {}
