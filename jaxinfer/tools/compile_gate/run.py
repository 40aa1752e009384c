"""Runs the compile gate's jobs: two child processes share them, so that both cores are busy to the
end and a compiler that crashes or hangs costs one row."""

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

from jaxinfer.tools.compile_gate.matrix import Job
from jaxinfer.tools.fed_child import FedChild

WORKER = Path(__file__).parent / "worker.py"
NUM_CHILDREN = 2

# No device is looked for, neither here nor by asking a cloud's metadata server for one; libtpu lets
# one process in at a time unless it is told that several are meant; and nothing is interpreted.
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


class Jobs:
    """The jobs that nobody has taken. Steps go first, the slow ones, since one left for last would
    leave a core idle; then each child stays with a target, whose topology it has open."""

    def __init__(self, jobs: Sequence[Job]):
        self._left = sorted(jobs, key=lambda job: job.kind != "step")
        self._lock = threading.Lock()

    def take(self, last: Job | None) -> Job | None:
        """The next job for a child that did `last`; None: there are no more."""
        with self._lock:
            if not self._left:
                return None
            index = 0
            if self._left[0].kind != "step":
                open_here = last.target if last else ""
                at_hand = (i for i, job in enumerate(self._left) if job.target == open_here)
                # None left: from the end, where the other child is not.
                index = next(at_hand, -1 if last else 0)
            return self._left.pop(index)


def run_jobs(
    jobs: Sequence[Job],
    on_row: Callable[[Row], None],
    worker: Path = WORKER,
    end: float = math.inf,
) -> list[Row]:
    """Compile the jobs in child processes.

    The rows come in the order of `jobs`; `on_row` gets each as it is done. A job that was not begun
    by `end`, a moment of `time.monotonic`, has none.
    """
    left, rows = Jobs(jobs), {}
    reporting = threading.Lock()

    def work() -> None:
        with FedChild([sys.executable, worker], ENVIRONMENT) as child:
            job = left.take(None)
            while job is not None and time.monotonic() < end:
                row = {"id": job.id} | child.ask(dataclasses.asdict(job), job.seconds)
                rows[job.id] = row
                with reporting:
                    on_row(row)
                job = left.take(job)

    with ThreadPoolExecutor(NUM_CHILDREN) as pool:
        for future in [pool.submit(work) for _ in range(NUM_CHILDREN)]:
            future.result()
    return [rows[job.id] for job in jobs if job.id in rows]
