"""The compile gate's ledger: which rows passed, from which sources and compilers.

An entry of `ledger.json` is a row that passed: a hash of everything the row depends on and what
the report shows of it. A row whose hash has changed is stale, and counts as never compiled. So a
short run can trust what is recorded, compile what changed, and compile some of the rest again
(`--ledger`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.tools.compile_gate.matrix import CompileJob, load_target

HERE = Path(__file__).parent
LEDGER = HERE / "ledger.json"

Row = dict[str, Any]
Versions = Mapping[str, str]

# What a recorded row keeps: the report's columns and what `report.problems` judges.
FIGURES = (
    "seconds",
    "job_cpu_seconds",
    "launches",
    "vmem",
    "registers",
    "shared",
    "spills",
    "temporaries",
    "num_layers",
    "memory",
    "tokens_cached",
    "compiled",
    "operators_per_layer",
    "per_layer",
    "collectives_per_layer",
    "collective_problems",
)
# What must come out the same when a row is compiled again from the same sources: the figures that
# do not depend on the machine that compiles.
REPEATED = ("launches", "per_layer", "spills")

# Packages that make the programs of a platform.
COMPILERS = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": (
        "jax",
        "jaxlib",
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
        "triton",
        "jax-triton",
    ),
    "cpu": ("jax", "jaxlib"),
}

# Processor seconds of a job that was never recorded, by its kind, where no other of the kind was.
TYPICAL_SECONDS = {"kernel": 5.0, "structure": 20.0, "step": 120.0}


@dataclasses.dataclass
class Ledger:
    """The recorded rows by job id, each with `inputs`, the hash of what it depends on."""

    compilers: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    entries: dict[str, Row] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = LEDGER) -> Ledger:
        """The ledger in a file; an empty one where the file does not exist."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text("utf-8"))
        return cls(found["compilers"], found["entries"])

    def save(self, path: Path = LEDGER) -> None:
        """Write one entry a line, so that a diff shows which rows changed."""
        lines = [
            f"{json.dumps(name)}: {json.dumps(self.entries[name], sort_keys=True)}"
            for name in sorted(self.entries)
        ]
        compilers = json.dumps(self.compilers, sort_keys=True)
        text = f'{{"compilers": {compilers},\n"entries": {{\n' + ",\n".join(lines) + "\n}}\n"
        temporary = path.with_suffix(".tmp")  # a run that is interrupted leaves the old file whole
        temporary.write_text(text, "utf-8")
        temporary.replace(path)

    def use_compilers(self, platform: str, versions: Versions) -> None:
        """Note a platform's compilers; what others had compiled for it is dropped."""
        wanted = compilers_of(platform, versions)
        if self.compilers.get(platform) != wanted:
            self.compilers[platform] = wanted
            self.entries = {
                name: entry
                for name, entry in self.entries.items()
                if load_target(name.partition(" ")[0]).platform != platform
            }

    def record(self, row: Row, inputs: str, problems: Sequence[str]) -> None:
        """Keep a row that passed; forget one that did not."""
        if problems:
            self.entries.pop(row["id"], None)
            return
        figures = {name: row[name] for name in FIGURES if name in row}
        for name in ("seconds", "job_cpu_seconds"):
            if name in figures:
                figures[name] = round(figures[name], 1)
        self.entries[row["id"]] = {"inputs": inputs} | figures

    def keep_only(self, jobs: Sequence[CompileJob]) -> None:
        """Forget rows that are no jobs any more."""
        known = {job.id for job in jobs}
        self.entries = {name: entry for name, entry in self.entries.items() if name in known}

    def row(self, job: CompileJob) -> Row:
        """The recorded row, as the report reads it."""
        return {"id": job.id, "status": "compiled", "is_recorded": True} | self.entries[job.id]

    def stale(self, jobs: Sequence[CompileJob], inputs: Mapping[str, str]) -> list[CompileJob]:
        """The jobs that are not recorded, or whose hash in `inputs` is another by now."""
        return [job for job in jobs if self._recorded_inputs(job) != inputs[job.id]]

    def _recorded_inputs(self, job: CompileJob) -> str | None:
        return self.entries.get(job.id, {}).get("inputs")

    def seconds(self, jobs: Sequence[CompileJob]) -> float:
        """Processor time that jobs took when they were recorded, together; of one that was not, its
        kind's median."""
        typical = dict(TYPICAL_SECONDS)
        for kind in typical:
            known = [
                entry["job_cpu_seconds"]
                for name, entry in self.entries.items()
                if _kind_of(entry) == kind and "job_cpu_seconds" in entry
            ]
            if known:
                typical[kind] = statistics.median(known)
        return sum(
            self.entries.get(job.id, {}).get("job_cpu_seconds", typical[job.kind]) for job in jobs
        )

    def sample(
        self, jobs: Sequence[CompileJob], seed: str, *, seconds: float, longest: float
    ) -> list[CompileJob]:
        """JobQueue to compile again: in an order that `seed` decides, as many as took `seconds`
        of processor time together, none of which took over `longest`."""
        order = lambda job: hashlib.sha256(f"{seed} {job.id}".encode()).digest()
        chosen: list[CompileJob] = []
        for job in sorted(jobs, key=order):
            cost = self.seconds([job])
            if cost <= min(seconds, longest):
                chosen.append(job)
                seconds -= cost
        return chosen

    def differences(self, row: Row) -> list[str]:
        """What came out otherwise than it was recorded, from the same sources and compilers."""
        recorded = self.entries[row["id"]]
        return [
            f"{name}: {row.get(name)}, recorded {recorded.get(name)}"
            for name in REPEATED
            if row.get(name) != recorded.get(name)
        ]


def _kind_of(entry: Row) -> str:
    if "per_layer" in entry:
        return "step"
    return "structure" if "num_layers" in entry else "kernel"


def compilers_of(platform: str, versions: Versions) -> dict[str, str]:
    """The versions that matter to a platform's programs."""
    return {name: versions[name] for name in COMPILERS[platform] if name in versions}
