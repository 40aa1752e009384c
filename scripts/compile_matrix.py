"""The compile gate's data: targets, what must compile on which, and the jobs that come of it."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MATRIX = HERE / "compile_matrix.toml"
TARGETS = HERE / "targets"

# Of one compile, by the clock. A whole model takes 10 to 40 s on two idle cores, a kernel under 10.
KERNEL_SECONDS = 120
STEP_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for; the file of its name in `scripts/targets` says where values are from.

    `memory_bytes` is one device's; `usable_share` what a runtime hands out of it.
    """

    name: str
    platform: str  # "tpu" or "gpu"
    topology: str
    memory_bytes: int
    usable_share: float
    compute_capability: int | None = None  # GPUs: 80 for 8.0
    target_config: str | None = None  # GPUs: XLA's GpuTargetConfigProto as text

    @property
    def limit_bytes(self) -> int:
        return int(self.memory_bytes * self.usable_share)


@dataclasses.dataclass(frozen=True)
class Job:
    """One row of the table: a kernel's case or a preset's step, on a target."""

    target: str
    kind: str  # "kernel" or "step"
    name: str  # of the operator or the preset
    values: dict[str, Any]  # kernel: backend, layout, page_size, batch, folded; step: model

    @property
    def id(self) -> str:
        """As in `h100 paged_attention/xla llama3_8b page=64 decode`."""
        if self.kind == "step":
            return f"{self.target} {self.name}"
        v = self.values
        pages = f"page={v['page_size']}{' folded' if v['folded'] else ''}"
        case = f"{v['layout']} {pages} {v['batch']}"
        return f"{self.target} {self.name}/{v['backend']} {case}"

    @property
    def seconds(self) -> int:
        """How long each of its compiles may take."""
        return STEP_SECONDS if self.kind == "step" else KERNEL_SECONDS


def target_names() -> list[str]:
    return sorted(path.stem for path in TARGETS.glob("*.toml"))


def load_target(name: str) -> Target:
    return Target(name, **tomllib.loads((TARGETS / f"{name}.toml").read_text(encoding="utf-8")))


def load_matrix(path: Path = MATRIX) -> dict[str, Any]:
    """The matrix; `ValueError` names everything in it that refers to nothing."""
    matrix = tomllib.loads(path.read_text(encoding="utf-8"))
    problems = []

    def known(what: str, names: Sequence[str], where: str, known_names: Any) -> None:
        problems.extend(f"{where}: no {what} {n!r}" for n in names if n not in known_names)

    for name, preset in matrix["presets"].items():
        known("model", [preset["model"]], f"presets.{name}", matrix["models"])
        known("target", preset["targets"], f"presets.{name}", target_names())
    for operator, backends in matrix["operators"].items():
        for backend, entry in backends.items():
            where = f"operators.{operator}.{backend}"
            known("target", entry["targets"], where, target_names())
            for case in entry["cases"]:
                known("layout", case["layouts"], where, matrix["layouts"])
                known("batch", case["batches"], where, matrix["batches"])
    if problems:
        raise ValueError(f"{path.name}: " + "; ".join(problems))
    return matrix


def choose(flag: str, asked: str, known: Sequence[str]) -> list[str]:
    """The names that `--flag=all`, `none` or `a,b` means; `ValueError` for an unknown one."""
    if asked in ("all", "none"):
        return list(known) if asked == "all" else []
    names = [name.strip() for name in asked.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"--{flag}={asked}: unknown {', '.join(unknown) or 'empty list'}; "
            f"known: {', '.join(known)}, all, none"
        )
    return names


def jobs_for(
    matrix: Mapping[str, Any],
    targets: Sequence[str],
    operators: Sequence[str],
    presets: Sequence[str],
) -> list[Job]:
    """All that the matrix asks of those targets, target by target; steps, the slow ones, first."""
    jobs = []
    for target in targets:
        for name in presets:
            preset = matrix["presets"][name]
            if target in preset["targets"]:
                jobs.append(Job(target, "step", name, {"model": preset["model"]}))
        for operator in operators:
            for backend, entry in matrix["operators"][operator].items():
                if target in entry["targets"]:
                    jobs += _kernel_jobs(target, operator, backend, entry["cases"])
    return jobs


def _kernel_jobs(target: str, operator: str, backend: str, cases: Any) -> list[Job]:
    jobs: dict[str, Job] = {}  # a case that two tables name is compiled once
    for case in cases:
        for layout, page_size, batch in itertools.product(
            case["layouts"], case["page_sizes"], case["batches"]
        ):
            values = {"backend": backend, "layout": layout, "page_size": page_size, "batch": batch}
            values["folded"] = case.get("folded", False)
            job = Job(target, "kernel", operator, values)
            jobs[job.id] = job
    return list(jobs.values())
