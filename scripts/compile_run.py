"""Runs the compile gate's jobs: a child process a target, so that a compiler that crashes or hangs
costs one row and not the run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compile_matrix import Job

WORKER = Path(__file__).parent / "compile_worker.py"
NUM_CHILDREN = 2
START_SECONDS = 120  # importing JAX and opening a topology
POLL_SECONDS = 0.1

# No device is looked for, neither here nor by asking a cloud's metadata server for one; libtpu lets
# one process in at a time unless it is told that several are meant.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "1",
}

Row = dict[str, Any]


def run_jobs(
    jobs: Sequence[Job], on_row: Callable[[Row], None], worker: Path = WORKER
) -> list[Row]:
    """A row for every job, in the order of `jobs`; `on_row` gets each as it is done."""
    by_target: dict[str, list[Job]] = {}
    for job in jobs:
        by_target.setdefault(job.target, []).append(job)
    # The target with the most to do first: the last one alone would leave a core idle.
    queues = sorted(by_target.values(), key=lambda queue: -sum(job.seconds for job in queue))
    with ThreadPoolExecutor(NUM_CHILDREN) as pool:
        rows = [row for queue in pool.map(lambda q: _run_target(q, on_row, worker), queues)
                for row in queue]  # fmt: skip
    by_id = {row["id"]: row for row in rows}
    return [by_id[job.id] for job in jobs]


def _run_target(jobs: list[Job], on_row: Callable[[Row], None], worker: Path) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < len(jobs):
        new = _run_child(jobs[len(rows) :], on_row, worker)
        rows += new
    return rows


def _run_child(jobs: list[Job], on_row: Callable[[Row], None], worker: Path) -> list[Row]:
    """Rows of the jobs that one child got through, the one it died of included: at least one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs_path, results_path = folder / "jobs.json", folder / "results.jsonl"
        jobs_path.write_text(json.dumps([dataclasses.asdict(job) for job in jobs]), "utf-8")
        results_path.touch()
        with open(folder / "stderr", "wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, worker, jobs_path, results_path],
                env=os.environ | ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            try:
                rows, end = _follow(child, jobs, results_path, on_row)
            finally:
                child.kill()
                child.wait()
        if len(rows) < len(jobs) and end:
            last_words = (folder / "stderr").read_text("utf-8", "replace").strip()[-2000:]
            rows.append(_ended(jobs[len(rows)], end, last_words))
            on_row(rows[-1])
    return rows


def _follow(
    child: subprocess.Popen[bytes], jobs: list[Job], path: Path, on_row: Callable[[Row], None]
) -> tuple[list[Row], str]:
    """The rows that the child wrote, and how it ended if it did not finish."""
    rows: list[Row] = []
    with open(path, encoding="utf-8") as results:
        deadline, line = time.monotonic() + START_SECONDS, ""
        while len(rows) < len(jobs):
            is_over = child.poll() is not None  # asked before reading: what it wrote is there
            while part := results.readline():
                line += part
                if not line.endswith("\n"):
                    continue
                event, line = json.loads(line), ""
                job = jobs[min(len(rows), len(jobs) - 1)]
                is_row = "status" in event
                deadline = time.monotonic() + (START_SECONDS if is_row else job.seconds)
                if is_row:
                    rows.append(event)
                    on_row(event)
            if len(rows) < len(jobs):
                if is_over:
                    return rows, "crashed"
                if time.monotonic() > deadline:
                    return rows, "timed out"
                time.sleep(POLL_SECONDS)
    return rows, ""


def _ended(job: Job, status: str, last_words: str) -> Row:
    if status == "timed out":
        return {"id": job.id, "status": status, "reason": f"a compile took over {job.seconds} s"}
    lines = [line for line in last_words.splitlines() if line.strip()]
    return {
        "id": job.id,
        "status": status,
        "reason": lines[-1][:300] if lines else "the compiler's process died without a word",
        "trace": last_words,
    }
