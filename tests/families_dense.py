"""Cases of the dense Llama-like families (see `family_bench.py`)."""

from __future__ import annotations

from family_bench import FamilyCase

CASES: dict[str, FamilyCase] = {
    "mistral": FamilyCase({"model_type": "mistral", "sliding_window": 9}),
}
