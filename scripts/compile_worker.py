"""The child process of the compile gate: compiles one target's jobs, a line of JSON for each event.

    python scripts/compile_worker.py JOBS.json RESULTS.jsonl

It writes `{"compiling": id}` before each of a job's compiles and `{"id": ..., "status": ...}` after
the last, so that the parent knows which job a crash or a hang belongs to. A status is one of

    compiled    with what was found
    declined    the backend says that it does not take such a case
    refused     the compiler, or the program on the way to it, failed; `reason` is its own
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from compile_kernels import CASES, check_kernel
from compile_matrix import Job, load_matrix, load_target
from compile_steps import check_step
from compile_target import Chip
from compile_text import first_reason, xla_spills


def run_job(chip: Chip, matrix: dict[str, Any], job: Job) -> dict[str, Any]:
    """What a job found."""
    if job.kind == "step":
        return check_step(chip, job.name, matrix["models"][job.values["model"]])
    v = job.values
    case = CASES[job.name](
        matrix["layouts"][v["layout"]],
        v["page_size"],
        matrix["batches"][v["batch"]],
        v["folded"],
    )
    return check_kernel(chip, job.name, v["backend"], case)


def checked(chip: Chip, matrix: dict[str, Any], job: Job) -> dict[str, Any]:
    """What became of a job, whatever it was; compilers' warnings of spills included."""
    found: dict[str, Any]
    with _StderrToFile() as log:
        try:
            found = {"status": "compiled", **run_job(chip, matrix, job)}
        except NotImplementedError as why:
            found = {"status": "declined", "reason": first_reason(why, 600)}
        except Exception as error:
            found = {
                "status": "refused",
                "reason": first_reason(error),
                "trace": traceback.format_exc()[-4000:],
            }
    if spilled := xla_spills(log.text):
        found["spills"] = found.get("spills", 0) + sum(spilled.values())
        found["spilled"] = spilled
    return {"id": job.id, **found}


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


def main(jobs_path: str, results_path: str) -> None:
    jobs = [Job(**values) for values in json.loads(Path(jobs_path).read_text(encoding="utf-8"))]
    matrix = load_matrix()
    with open(results_path, "a", encoding="utf-8", buffering=1) as results:

        def write(event: dict[str, Any]) -> None:
            results.write(json.dumps(event) + "\n")

        chip = Chip(load_target(jobs[0].target), lambda: write({"compiling": job.id}))
        for job in jobs:
            write(checked(chip, matrix, job))


if __name__ == "__main__":
    main(*sys.argv[1:])
