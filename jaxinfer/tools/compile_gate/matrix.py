"""The compile gate's data: targets, what must compile on which, and the jobs that come of it."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MATRIX = HERE / "matrix.toml"
TARGETS = HERE.parent / "targets"

# What each backend of an operator is for; others run anywhere.
BACKEND_PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "hopper": "gpu"}

# Chips for which a step of every structure is compiled.
STRUCTURE_TARGETS = ("v5e", "h100")

# Of one compile, by the clock. A whole model takes 10 to 40 s on two idle cores, a kernel under 10.
KERNEL_SECONDS = 120
STEP_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of chip to compile for; its file in `jaxinfer/tools/targets` gives the sources.

    `memory_bytes` and rates are one device's; `usable_share` what a runtime hands out of the
    memory. `shape`: chips along the axes of a TPU's slice, hosts and GPUs a host, or CPU devices;
    None: one device alone.
    """

    name: str  # "v5e", or with its topology "v5e:4x4"
    platform: str  # "tpu", "gpu" or "cpu"
    topology: str  # as the platform's compiler names it
    memory_bytes: int
    usable_share: float
    memory_rate: float  # bytes/s
    link_rate: float  # bytes/s one way: a TPU's link, a GPU's links together
    flops: Mapping[str, float]  # number type -> dense products' FLOP/s
    network_rate: float | None = None  # bytes/s one way between hosts
    devices_per_chip: int = 1
    shape: tuple[int, ...] | None = None
    compute_capability: int | None = None  # GPUs: 80 for 8.0
    target_config: str | None = None  # GPUs: XLA's GpuTargetConfigProto as text

    @property
    def limit_bytes(self) -> int:
        return int(self.memory_bytes * self.usable_share)

    @property
    def chip(self) -> str:
        """The name without the topology."""
        return self.name.partition(":")[0]

    @property
    def num_devices(self) -> int:
        return 1 if self.shape is None else math.prod(self.shape) * self.devices_per_chip

    def at(self, topology: str) -> Target:
        """These chips in a topology: "4x4" or "2x2x1" of a TPU, "8" or "2x8" (hosts x GPUs) of
        GPUs; "1" is one device alone. `ValueError` says what would do."""
        wanted = r"\d+(x\d+)*"
        shape = tuple(map(int, topology.split("x"))) if re.fullmatch(wanted, topology) else (0,)
        name = f"{self.chip}:{topology}"
        if min(shape) < 1:
            raise ValueError(f"target {name}: a topology is like {self._example()}")
        if math.prod(shape) == 1:
            return dataclasses.replace(self, name=name)
        if self.platform == "gpu" and len(shape) <= 2:
            shape = (1,) * (2 - len(shape)) + shape
            compiler_name = "x".join(map(str, (1, *shape)))  # slices x hosts x GPUs
        elif self.platform == "tpu" and len(shape) == self._example().count("x") + 1:
            compiler_name = name
        elif self.platform == "cpu" and len(shape) == 1:
            compiler_name = topology
        else:
            raise ValueError(f"target {name}: a topology is like {self._example()}")
        return dataclasses.replace(self, name=name, topology=compiler_name, shape=shape)

    def _example(self) -> str:
        return {"gpu": "8 or 2x8 (hosts x GPUs)", "cpu": "8"}.get(
            self.platform, self.topology.partition(":")[2]
        )

    def runs(self, backend: str) -> bool:
        """Whether a backend of that name is for this chip; one for no chip in particular is."""
        if backend == "hopper":
            return (self.compute_capability or 0) >= 90
        return BACKEND_PLATFORMS.get(backend, self.platform) == self.platform

    def of_gpu(self, field: str) -> float:
        """A number of `target_config`, as `core_count`."""
        found = re.search(rf"\b{field}: ([0-9.]+)", self.target_config or "")
        if found is None:
            raise ValueError(f"targets/{self.chip}.toml has no {field}")
        return float(found.group(1))

    @property
    def device_kind(self) -> str:
        """A GPU's name as its driver has it."""
        found = re.search(r'device_description_str: "([^"]*)"', self.target_config or "")
        return found.group(1) if found else self.chip


@dataclasses.dataclass(frozen=True)
class Job:
    """One row of the table: a kernel's case, a preset's step or a structure's, on a target."""

    target: str  # with its topology where that matters, as "v5e:4x4"
    kind: str  # "kernel", "step" or "structure"
    name: str  # of the operator, the preset or the structure
    values: dict[str, Any]  # kernel: backend, case; step: `check_step`'s; structure: nothing

    @property
    def id(self) -> str:
        """As in `h100 paged_attention/gpu llama3_8b decode`."""
        if self.kind == "step":
            return f"{self.target} {self.name}"
        if self.kind == "structure":
            return f"{self.target} structure {self.name}"
        return f"{self.target} {self.name}/{self.values['backend']} {self.values['case']}"

    @property
    def seconds(self) -> int:
        """How long each of its compiles may take."""
        return KERNEL_SECONDS if self.kind == "kernel" else STEP_SECONDS


def target_names() -> list[str]:
    return sorted(path.stem for path in TARGETS.glob("*.toml"))


def load_target(name: str) -> Target:
    """By the name of a chip, with or without a topology: "v5e", "v5e:4x4". `ValueError` for one
    that is not there."""
    chip, colon, topology = name.partition(":")
    if chip not in target_names():
        raise ValueError(f"no target {chip!r}; there are {', '.join(target_names())}")
    target = Target(chip, **tomllib.loads((TARGETS / f"{chip}.toml").read_text(encoding="utf-8")))
    return target.at(topology) if colon else target


def load_matrix(path: Path = MATRIX) -> dict[str, Any]:
    """The matrix; `ValueError` names everything in it that refers to nothing."""
    matrix = tomllib.loads(path.read_text(encoding="utf-8"))
    problems = []

    def known(what: str, names: Sequence[str], where: str, known_names: Any) -> None:
        problems.extend(f"{where}: no {what} {n!r}" for n in names if n not in known_names)

    for name, preset in matrix["presets"].items():
        known("model", [preset["model"]], f"presets.{name}", matrix["models"])
        known("target of its own", preset["whole"], f"presets.{name}", preset["targets"])
        for target in preset["targets"]:
            try:
                load_target(target)
            except ValueError as error:
                problems.append(f"presets.{name}: {error}")
    for name, mesh in matrix.get("meshes", {}).items():
        known("preset", [mesh["preset"]], f"meshes.{name}", matrix["presets"])
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
    cases: Mapping[str, Mapping[str, Any]],
    presets: Sequence[str],
    structures: Sequence[str] = (),
) -> list[Job]:
    """All that is asked of those chips, one after another; steps, the slow ones, first, those of
    its topologies among them.

    `cases`: operator -> name -> `kernel_cases.Case`.
    """
    jobs = []
    for name in targets:
        target = load_target(name)
        for preset in presets:
            entry = matrix["presets"][preset]
            for place in entry["targets"]:
                if place.partition(":")[0] == name:
                    values = {"model": entry["model"], "is_whole": place in entry["whole"]}
                    if "most_gb" in entry:
                        values["most_bytes"] = entry["most_gb"] * 1e9
                    jobs.append(Job(place, "step", preset, values))
        for mesh, entry in matrix.get("meshes", {}).items():
            if entry["preset"] in presets and entry["target"].partition(":")[0] == name:
                values = {"preset": entry["preset"], "overrides": entry["set"], "is_whole": False}
                values["model"] = matrix["presets"][entry["preset"]]["model"]
                jobs.append(Job(entry["target"], "step", f"{entry['preset']} {mesh}", values))
        if name in STRUCTURE_TARGETS:
            jobs += [Job(name, "structure", structure, {}) for structure in structures]
        jobs += [
            Job(name, "kernel", operator, {"backend": backend, "case": case_name})
            for operator, its_cases in cases.items()
            for case_name, case in its_cases.items()
            for backend in case.backends
            if name in case.targets and target.runs(backend)
        ]
    return jobs
