"""The child process of the compile gate, which compiles the jobs it receives (`job_process.py`).

It reports each compile as it begins, so that each has the full time limit. The status of a row is

    compiled    with its figures
    declined    the backend does not support the case
    refused     the compiler failed, or tracing did; `reason` is the message

or, from the parent, "crashed" or "timed out".
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
from jaxinfer.tools.compile_gate.matrix import CompileJob, load_matrix, load_target
from jaxinfer.tools.compile_gate.steps import check_step
from jaxinfer.tools.compile_gate.structures import check_structure
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import first_reason, xla_spills
from jaxinfer.tools.job_process import serve_jobs
from jaxinfer.tools.planner.models import model_from_table


class CompileWorker:
    """The state that a process keeps between jobs: topologies, compiled kernels, cases."""

    def __init__(self) -> None:
        self.matrix = load_matrix()
        self.send_event: Callable[[dict[str, Any]], None] = lambda event: None
        self.chip = functools.cache(self._chip)
        self.triton = functools.cache(lambda name: TritonCompiler(load_target(name)))
        self.cases = functools.cache(kernel_cases.load)

    def _chip(self, name: str) -> Chip:
        return Chip(load_target(name), lambda: self.send_event({"compiling": name}))

    def run(self, job: CompileJob) -> dict[str, Any]:
        """Run a job and return its figures."""
        chip = self.chip(job.target)
        if job.kind == "step":
            values = dict(job.values)
            name, preset = values.pop("model"), values.pop("preset", job.name)
            return check_step(
                chip, preset, model_from_table(name, self.matrix["models"][name]), **values
            )
        if job.kind == "structure":
            return check_structure(chip, self.matrix["structures"][job.name])
        case = self.cases(job.name)[job.values["case"]]
        triton = self.triton(job.target) if chip.target.platform == "gpu" else None
        return check_kernel(chip, triton, case, job.values["backend"])

    def handle(
        self, values: dict[str, Any], send_event: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Run a job of any kind and return its row, with the spills that compilers warn of and the
        processor time, tracing included."""
        self.send_event = send_event
        started = processor_time()
        found: dict[str, Any]
        with _StderrToFile() as log:
            try:
                found = {"status": "compiled", **self.run(CompileJob(**values))}
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
    """The cause of a Triton error, whose own text is only a line in a kernel, once per call."""
    while type(error).__name__ == "CompilationError" and error.__cause__ is not None:
        error = error.__cause__
    return error


class _StderrToFile:
    """Collects what this process and its C++ libraries write to standard error."""

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
        sys.stderr.write(self.text)  # the parent reports the end of it after a crash


if __name__ == "__main__":
    serve_jobs(CompileWorker().handle)
