"""Run the compile gate's jobs in two child processes, so that both cores stay busy and a compiler
that crashes or hangs costs one row."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxinfer.tools.compile_gate.matrix import CompileJob
from jaxinfer.tools.job_process import JobProcess

WORKER = Path(__file__).parent / "worker.py"
NUM_CHILDREN = 2

# The children look for no device, neither on this machine nor through a cloud's metadata server.
# libtpu admits one process at a time unless it is told otherwise, and Triton must not interpret.
ENVIRONMENT: dict[str, str | None] = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "TRITON_INTERPRET": None,
}

Row = dict[str, Any]


class JobQueue:
    """The jobs that are still to run.

    Steps go first, because a slow one at the end would leave a core idle. After that a child stays
    with one target, whose topology it has already opened.
    """

    def __init__(self, jobs: Sequence[CompileJob]):
        self._left = sorted(jobs, key=lambda job: job.kind != "step")
        self._lock = threading.Lock()

    def take(self, last: CompileJob | None) -> CompileJob | None:
        """The next job for a child whose previous job was `last`; None where none is left."""
        with self._lock:
            if not self._left:
                return None
            index = 0
            if self._left[0].kind != "step":
                open_here = last.target if last else ""
                at_hand = (i for i, job in enumerate(self._left) if job.target == open_here)
                # No job of that target is left: take one from the end, away from the other child.
                index = next(at_hand, -1 if last else 0)
            return self._left.pop(index)


def run_jobs(
    jobs: Sequence[CompileJob],
    on_row: Callable[[Row], None],
    worker: Path = WORKER,
    end: float = math.inf,
) -> list[Row]:
    """Compile the jobs in child processes.

    The rows come in the order of `jobs`; `on_row` gets each as it is done. A job that was not begun
    by `end`, a moment of `time.monotonic`, has none.
    """
    left, rows = JobQueue(jobs), {}
    reporting = threading.Lock()

    def work() -> None:
        with JobProcess([sys.executable, worker], ENVIRONMENT) as child:
            job = left.take(None)
            while job is not None and time.monotonic() < end:
                row = {"id": job.id} | child.run(dataclasses.asdict(job), job.seconds)
                rows[job.id] = row
                with reporting:
                    on_row(row)
                job = left.take(job)

    with ThreadPoolExecutor(NUM_CHILDREN) as pool:
        for future in [pool.submit(work) for _ in range(NUM_CHILDREN)]:
            future.result()
    return [rows[job.id] for job in jobs if job.id in rows]
