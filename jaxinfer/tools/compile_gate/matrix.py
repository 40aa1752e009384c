"""The compile gate's data: targets, what must compile for each, and the resulting jobs."""

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

# The platform of each backend of an operator; other backends run anywhere.
BACKEND_PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "hopper": "gpu"}

# Chips for which a step of every structure is compiled.
STRUCTURE_TARGETS = ("v5e", "h100")

# Wall-clock limits of one compile. A whole model takes 10 to 40 s on two idle cores, a kernel under
# 10.
KERNEL_SECONDS = 120
STEP_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class ChipTarget:
    """A kind of chip to compile for; its file in `jaxinfer/tools/targets` cites the sources.

    `memory_bytes` and the rates are those of one device; `usable_share` is the fraction of the
    memory that a runtime hands out. `shape` counts chips along the axes of a TPU slice, hosts and
    GPUs per host, or CPU devices; None is one device alone.
    """

    name: str  # "v5e", or with its topology "v5e:4x4"
    platform: str  # "tpu", "gpu" or "cpu"
    topology: str  # in the form that the platform's compiler takes
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

    def at(self, topology: str) -> ChipTarget:
        """These chips in a topology: "4x4" or "2x2x1" for a TPU, "8" or "2x8" (hosts x GPUs) for
        GPUs; "1" is one device alone.

        Raises `ValueError`, which gives an example, for a topology that the chip does not have.
        """
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
        """Whether this chip runs the backend of that name; a backend for no platform runs on
        all."""
        if backend == "hopper":
            return (self.compute_capability or 0) >= 90
        return BACKEND_PLATFORMS.get(backend, self.platform) == self.platform

    def gpu_field(self, field: str) -> float:
        """A number from `target_config`, such as `core_count`."""
        found = re.search(rf"\b{field}: ([0-9.]+)", self.target_config or "")
        if found is None:
            raise ValueError(f"targets/{self.chip}.toml has no {field}")
        return float(found.group(1))

    @property
    def device_kind(self) -> str:
        """A GPU's name as its driver reports it."""
        found = re.search(r'device_description_str: "([^"]*)"', self.target_config or "")
        return found.group(1) if found else self.chip


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """One row of the table: a kernel's case, a preset's step, or a structure's step, on a
    target."""

    target: str  # with its topology where it has one, such as "v5e:4x4"
    kind: str  # "kernel", "step" or "structure"
    name: str  # the operator, the preset or the structure
    values: dict[str, Any]  # kernel: backend, case; step: arguments of `check_step`; else empty

    @property
    def id(self) -> str:
        """Such as `h100 paged_attention/gpu llama3_8b decode`."""
        if self.kind == "step":
            return f"{self.target} {self.name}"
        if self.kind == "structure":
            return f"{self.target} structure {self.name}"
        return f"{self.target} {self.name}/{self.values['backend']} {self.values['case']}"

    @property
    def seconds(self) -> int:
        """The time limit of each of its compiles."""
        return KERNEL_SECONDS if self.kind == "kernel" else STEP_SECONDS


def target_names() -> list[str]:
    return sorted(path.stem for path in TARGETS.glob("*.toml"))


def load_target(name: str) -> ChipTarget:
    """Load a chip by its name, with or without a topology: "v5e", "v5e:4x4".

    Raises `ValueError` for an unknown chip.
    """
    chip, colon, topology = name.partition(":")
    if chip not in target_names():
        raise ValueError(f"no target {chip!r}; there are {', '.join(target_names())}")
    target = ChipTarget(
        chip, **tomllib.loads((TARGETS / f"{chip}.toml").read_text(encoding="utf-8"))
    )
    return target.at(topology) if colon else target


def load_matrix(path: Path = MATRIX) -> dict[str, Any]:
    """Read the matrix.

    Raises `ValueError`, which names every reference in it to something that does not exist.
    """
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
    """The names that `--flag=all`, `none` or `a,b` selects.

    Raises `ValueError` for an unknown name.
    """
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
) -> list[CompileJob]:
    """List the jobs of the chips, one chip after another. Steps, which are slow, come first; they
    include those of the chip's topologies.

    `cases` maps an operator to its `kernel_cases.Case` by name.
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
                    jobs.append(CompileJob(place, "step", preset, values))
        for mesh, entry in matrix.get("meshes", {}).items():
            if entry["preset"] in presets and entry["target"].partition(":")[0] == name:
                values = {"preset": entry["preset"], "overrides": entry["set"], "is_whole": False}
                values["model"] = matrix["presets"][entry["preset"]]["model"]
                jobs.append(
                    CompileJob(entry["target"], "step", f"{entry['preset']} {mesh}", values)
                )
        if name in STRUCTURE_TARGETS:
            jobs += [CompileJob(name, "structure", structure, {}) for structure in structures]
        jobs += [
            CompileJob(name, "kernel", operator, {"backend": backend, "case": case_name})
            for operator, its_cases in cases.items()
            for case_name, case in its_cases.items()
            for backend in case.backends
            if name in case.targets and target.runs(backend)
        ]
    return jobs
