"""What the benches report: samples of both sides, their ratio, the target, and the machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Measure:
    """One row of the table: samples of ours and, where there is one, of what it is compared to."""

    case: str
    unit: str
    ours: list[float]
    other: list[float] = dataclasses.field(default_factory=list)
    other_name: str = ""
    target: float | None = None
    bound: Literal["at least", "at most"] = "at least"

    @property
    def value(self) -> float:
        """Ratio of medians, or the median itself where there is nothing to compare with."""
        ours = statistics.median(self.ours)
        return ours / statistics.median(self.other) if self.other else ours

    @property
    def is_reached(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.bound == "at least" else self.value <= self.target

    def columns(self) -> list[str]:
        """The cells of its row."""
        best = max if self.bound == "at least" else min
        cell = lambda x: f"{statistics.median(x):.4g} ({best(x):.4g})" if x else ""
        must = f"{self.bound} {self.target:g}" if self.target is not None else ""
        verdict = {True: "yes", False: "NO", None: ""}[self.is_reached]
        ratio = f"{self.value:.3g}" if self.other else ""
        other = f"{cell(self.other)} {self.other_name}" if self.other else ""
        return [self.case, self.unit, cell(self.ours), other, ratio, must, verdict]

    def as_json(self) -> dict[str, Any]:
        """Everything, samples included."""
        return dataclasses.asdict(self) | {"value": self.value, "is_reached": self.is_reached}


def machine(threads: int) -> dict[str, Any]:
    """The processor, its cores and memory."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count(), "memory_bytes": memory, "threads": threads}


def print_table(measures: Sequence[Measure]) -> None:
    """Medians, with the best in brackets."""
    head = ["case", "unit", "jaxinfer", "compared with", "ratio", "must reach", "reached"]
    table = [head, *(measure.columns() for measure in measures)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
