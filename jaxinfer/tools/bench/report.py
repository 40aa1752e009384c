"""The results of benchmarks: samples of both sides, their ratio, the target, and the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """One timed generation: the tokens of each prompt, the seconds until all prompts had their
    first token, and the seconds after that."""

    tokens: list[list[int]]
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the start to the last token."""
        return self.prefill_s + self.decode_s


@dataclasses.dataclass(frozen=True)
class Measure:
    """One row of the table: our samples and, if any, those of what they are compared with."""

    case: str
    unit: str
    ours: list[float]
    other: list[float] = dataclasses.field(default_factory=list)
    other_name: str = ""
    target: float | None = None
    bound: Literal["at least", "at most"] = "at least"

    @property
    def value(self) -> float:
        """The ratio of medians, or our median where there is nothing to compare with."""
        ours = statistics.median(self.ours)
        return ours / statistics.median(self.other) if self.other else ours

    @property
    def is_reached(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.bound == "at least" else self.value <= self.target

    def columns(self) -> list[str]:
        """The columns of the row."""
        best = max if self.bound == "at least" else min
        column = lambda x: f"{statistics.median(x):.4g} ({best(x):.4g})" if x else ""
        must = f"{self.bound} {self.target:g}" if self.target is not None else ""
        verdict = {True: "yes", False: "NO", None: ""}[self.is_reached]
        ratio = f"{self.value:.3g}" if self.other else ""
        other = f"{column(self.other)} {self.other_name}" if self.other else ""
        return [self.case, self.unit, column(self.ours), other, ratio, must, verdict]

    def as_json(self) -> dict[str, Any]:
        """All fields, including samples."""
        return dataclasses.asdict(self) | {"value": self.value, "is_reached": self.is_reached}


def machine(threads: int) -> dict[str, Any]:
    """The processor, its cores and memory."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count(), "memory_bytes": memory, "threads": threads}


class OtherLoad:
    """Measures how much of the machine other processes use while something is timed.

    A peer whose threads spin at barriers (PyTorch's do) slows down far more than its share when it
    is disturbed, and a ratio taken then means nothing.
    """

    LIMIT = 0.05  # a larger share invalidates a measurement

    def __init__(self):
        self.shares: dict[str, float] = {}  # by case, share of all cores; empty where unknown

    @contextlib.contextmanager
    def watch(self, case: str) -> Iterator[None]:
        """Record the share of processor time that other processes used."""
        start, before = time.perf_counter(), self._others()
        yield
        after, seconds = self._others(), time.perf_counter() - start
        if before is not None and after is not None:
            self.shares[case] = max(0.0, (after - before) / seconds / (os.cpu_count() or 1))

    def print_warnings(self) -> None:
        """Name the cases that were disturbed."""
        for case, share in self.shares.items():
            if share > self.LIMIT:
                print(f"{case}: other processes took {share:.0%} of the machine; not comparable")

    @staticmethod
    def _others() -> float | None:
        """Processor seconds of all other processes since the machine started; None without
        /proc."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:]]
        idle = ticks[3] + ticks[4]
        total = (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK")
        return total - sum(os.times()[:4])


def print_table(measures: Sequence[Measure]) -> None:
    """Print medians, with the best sample in parentheses."""
    head = ["case", "unit", "jaxinfer", "compared with", "ratio", "must reach", "reached"]
    table = [head, *(measure.columns() for measure in measures)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
