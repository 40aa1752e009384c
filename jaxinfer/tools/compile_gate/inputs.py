"""What each row of the compile gate depends on, as one hash: sources, data, compilers."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jaxinfer.kernels.tuning import FOLDER as TUNED
from jaxinfer.tools.compile_gate.ledger import Versions, compilers_of
from jaxinfer.tools.compile_gate.matrix import TARGETS, CompileJob, load_target
from jaxinfer.tools.compile_gate.run import ENVIRONMENT
from jaxinfer.tools.compile_gate.sources import SourceTree, digest, installed_modules

GATE = "jaxinfer.tools.compile_gate"
CASES = "jaxinfer.tools.kernel_cases"


class Inputs:
    """Hashes of jobs' inputs. A kernel's are the modules of its operator, of its cases, and those
    they import; a step's everything that its program is made of, its preset and its model."""

    def __init__(
        self,
        matrix: Mapping[str, Any],
        versions: Versions,
        tree: SourceTree | None = None,
    ):
        self._matrix = matrix
        self._versions = versions
        self._tree = tree or SourceTree(installed_modules())
        self._target_data = functools.cache(_target_data)
        self._tuned = digest(_tuned_texts())

    def all(self, jobs: Sequence[CompileJob]) -> dict[str, str]:
        """A hash for every job, by its id."""
        return {job.id: self.of(job) for job in jobs}

    def of(self, job: CompileJob) -> str:
        """The hash of one job."""
        target = load_target(job.target)
        return digest(
            {
                "sources": self._tree.digest(self.roots(job)),
                "data": self._data(job),
                "job": [job.target, job.kind, job.name, job.values],
                "target": self._target_data(target.chip),
                "tuned": self._tuned,
                "compilers": compilers_of(target.platform, self._versions),
                "environment": ENVIRONMENT,
            }
        )

    def roots(self, job: CompileJob) -> list[str]:
        """The modules whose code, with all they import, decides the job's program."""
        if job.kind == "step":
            return [f"{GATE}.steps"]
        if job.kind == "structure":
            return [f"{GATE}.structures"]
        operator = self._tree.below(f"jaxinfer.kernels.{job.name}")
        return [*operator, f"{CASES}.{job.name}", f"{GATE}.kernels"]

    def _data(self, job: CompileJob) -> Any:
        if job.kind == "structure":
            return self._matrix["structures"][job.name]
        if job.kind == "step":
            preset = job.values.get("preset", job.name)
            path = resources.files("jaxinfer.configs") / f"{preset}.toml"
            model = self._matrix["models"][job.values["model"]]
            return [model, tomllib.loads(path.read_text("utf-8"))]
        return None


def _target_data(chip: str) -> dict[str, Any]:
    """The values of a target's file, without its comments."""
    return tomllib.loads((TARGETS / f"{chip}.toml").read_text("utf-8"))


def _tuned_texts() -> dict[str, str]:
    """Measured tilings, by file."""
    return {path.name: path.read_text("utf-8") for path in sorted(TUNED.glob("*.json"))}
