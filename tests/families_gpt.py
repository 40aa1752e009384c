"""Cases of the GPT-2-like families, GPT-NeoX and BLOOM (see `family_bench.py`)."""

from __future__ import annotations

from family_bench import FamilyCase

CASES: dict[str, FamilyCase] = {}
