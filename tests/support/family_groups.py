"""All family cases by group; a group has a file of cases and one of recorded logits."""

from __future__ import annotations

from tests.support import families_deepseek, families_dense, families_gpt, families_moe
from tests.support.family_bench import FamilyCase

GROUPS: dict[str, dict[str, FamilyCase]] = {
    "dense": families_dense.CASES,
    "moe": families_moe.CASES,
    "gpt": families_gpt.CASES,
    "deepseek": families_deepseek.CASES,
}
ALL = [(group, name) for group, cases in GROUPS.items() for name in cases]
