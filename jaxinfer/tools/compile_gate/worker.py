"""The child process of the compile gate: compiles the jobs that it is fed (`fed_child.py`).

It tells of each compile as it begins, so that each has its time. A row's status is one of

    compiled    with what was found
    declined    the backend says that it does not take such a case
    refused     the compiler, or the program on the way to it, failed; `reason` is its own

and of the parent: crashed, timed out.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from jaxinfer.tools import kernel_cases
from jaxinfer.tools.compile_gate.kernels import TritonCompiler, check_kernel, processor_time
from jaxinfer.tools.compile_gate.matrix import Job, load_matrix, load_target
from jaxinfer.tools.compile_gate.steps import check_step
from jaxinfer.tools.compile_gate.structures import check_structure
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import first_reason, xla_spills
from jaxinfer.tools.fed_child import serve
from jaxinfer.tools.planner.models import from_table


class Worker:
    """What one process keeps between its jobs: topologies, kernels compiled, the cases."""

    def __init__(self) -> None:
        self.matrix = load_matrix()
        self.tell: Callable[[dict[str, Any]], None] = lambda event: None
        self.chip = functools.cache(self._chip)
        self.triton = functools.cache(lambda name: TritonCompiler(load_target(name)))
        self.cases = functools.cache(kernel_cases.load)

    def _chip(self, name: str) -> Chip:
        return Chip(load_target(name), lambda: self.tell({"compiling": name}))

    def run(self, job: Job) -> dict[str, Any]:
        """What a job found."""
        chip = self.chip(job.target)
        if job.kind == "step":
            values = dict(job.values)
            name, preset = values.pop("model"), values.pop("preset", job.name)
            return check_step(chip, preset, from_table(name, self.matrix["models"][name]), **values)
        if job.kind == "structure":
            return check_structure(chip, self.matrix["structures"][job.name])
        case = self.cases(job.name)[job.values["case"]]
        triton = self.triton(job.target) if chip.target.platform == "gpu" else None
        return check_kernel(chip, triton, case, job.values["backend"])

    def handle(
        self, values: dict[str, Any], tell: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Run a job of any kind: its row, with compilers' warnings of spills and the processor
        time of all of it, tracing included."""
        self.tell = tell
        started = processor_time()
        found: dict[str, Any]
        with _StderrToFile() as log:
            try:
                found = {"status": "compiled", **self.run(Job(**values))}
            except NotImplementedError as why:
                reason = first_reason(" ".join(str(why).split()), 600)
                found = {"status": "declined", "reason": reason}
            except Exception as error:
                found = {
                    "status": "refused",
                    "reason": first_reason(_root(error)),
                    "trace": traceback.format_exc()[-4000:],
                }
        if spilled := xla_spills(log.text):
            found["spills"] = found.get("spills", 0) + sum(spilled.values())
            found["spilled"] = spilled
        return found | {"job_cpu_seconds": processor_time() - started}


def _root(error: BaseException) -> BaseException:
    """What a Triton error comes from: its own text is a place in a kernel, once for every call."""
    while type(error).__name__ == "CompilationError" and error.__cause__ is not None:
        error = error.__cause__
    return error


class _StderrToFile:
    """Collects what this process, its C++ libraries included, writes to standard error."""

    text = ""

    def __enter__(self) -> _StderrToFile:
        sys.stderr.flush()
        self._file = tempfile.TemporaryFile()
        self._kept = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stderr.flush()
        os.dup2(self._kept, 2)
        os.close(self._kept)
        self._file.seek(0)
        self.text = self._file.read().decode("utf-8", "replace")
        self._file.close()
        sys.stderr.write(self.text)  # the parent keeps its end, for a crash's last words


if __name__ == "__main__":
    serve(Worker().handle)
