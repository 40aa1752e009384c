"""The steps of the device check, their order, and their time limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.tools.job_process import JobProcess
from jaxinfer.tools.kernel_calls import backend_names
from jaxinfer.tools.kernel_cases import Case

Row = dict[str, Any]

CHECK_SECONDS, TIME_SECONDS, PEER_SECONDS = 60, 40, 30
CEILING_SECONDS = 60
ENGINE_SECONDS = 120
# Seconds of the run (eight minutes) that are reserved for the parts after the kernels.
ENGINE_RESERVE, PEER_RESERVE = 150.0, 45.0
ENGINE_JOBS = (
    ("decode", 1, 512),
    ("decode", 32, 512),
    ("decode", 256, 512),
    ("first_token", 1, 8184),  # with its output 8,192
    ("options", 32, 512),
)
TINY_ENGINE_JOBS = (("decode", 2, 16), ("first_token", 1, 64), ("options", 2, 16))
ENGINE_NAMES = {
    "decode": "{rows} rows decode",
    "first_token": "first token of {prompt}",
    "options": "{rows} rows by XLA's options",
}


class TimeBudget:
    """The time that is left of the run; no job begins after it."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._end = now() + seconds

    def left(self, reserved: float = 0.0) -> float:
        return self._end - reserved - self._now()

    def run(
        self,
        child: JobProcess,
        job: Row,
        seconds: float,
        reserved: float = 0.0,
        needed: float = 1.0,
    ) -> Row:
        """Run a job in the child within `seconds` and the time left, less `reserved`; starting the
        child counts too. The job is not run with less than `needed` seconds left."""
        left = self.left(reserved)
        if left < max(1.0, needed):
            return {"status": "not run", "reason": "the run's time was over"}
        return child.run(job, min(seconds, left), within=left)


def kernel_rows(cases: Mapping[str, Mapping[str, Case]], platform: str) -> list[Row]:
    """An empty row for every case and backend of the platform.

    Headlines come first; within each group the first case of every operator comes before any second
    one, so that every operator is covered if the time runs out.
    """
    ordered = [
        (not case.is_headline, depth, operator, name)
        for operator, its_cases in cases.items()
        for depth, (name, case) in enumerate(its_cases.items())
    ]
    ordered.sort(key=lambda place: place[:2])
    return [
        _kernel_row(operator, name, cases[operator][name], backend)
        for *_, operator, name in ordered
        for backend in backend_names(cases[operator][name], platform)
    ]


def _kernel_row(operator: str, name: str, case: Case, backend: str) -> Row:
    return {
        "kind": "kernel",
        "operator": operator,
        "case": name,
        "backend": backend,
        "name": f"{operator}/{backend} {name}",
        "bytes_moved": case.bytes_moved,
        "flops": case.flops,
        "tolerance": case.tolerance,
        "has_peer": case.peer is not None,
        "is_headline": case.is_headline,
    }


def kernel_job(row: Row, kind: str, rehearse: bool) -> Row:
    """The job of a kind for a kernel's row."""
    names = ("operator", "case", "backend")
    return {"kind": kind, "rehearse": rehearse, **{name: row[name] for name in names}}


def check_kernels(
    child: JobProcess, budget: TimeBudget, rows: Sequence[Row], rehearse: bool, reserved: float
) -> None:
    """Check each row's agreement with the reference, then time the rows that agree."""
    for row in rows:
        row |= budget.run(child, kernel_job(row, "check", rehearse), CHECK_SECONDS, reserved)
        if row["status"] != "measured" or not row["agrees"]:
            continue
        timed = budget.run(child, kernel_job(row, "measure", rehearse), TIME_SECONDS, reserved)
        if timed.pop("status") == "measured":
            row |= timed
            if not rehearse and timed["seconds"] <= 0:
                row["time_problem"] = f"{timed['calls']} calls take no more time than none"
        else:
            row["time_problem"] = timed["reason"]


def check_peers(child: JobProcess, budget: TimeBudget, rows: Sequence[Row], rehearse: bool) -> None:
    """Time PyTorch once for every case that was timed and has a peer."""
    known: dict[tuple[str, str], Row] = {}
    for row in rows:
        if not row["has_peer"] or "seconds" not in row:
            continue
        key = row["operator"], row["case"]
        if key not in known:
            known[key] = budget.run(child, kernel_job(row, "peer", rehearse), PEER_SECONDS)
        if known[key]["status"] == "measured":
            row["peer_seconds"], row["peer_how"] = known[key]["seconds"], known[key]["how"]
        else:
            row["peer_problem"] = f"{known[key]['status']}: {known[key]['reason']}"


def check_engine(
    child: JobProcess, budget: TimeBudget, rehearse: bool, reserved: float
) -> list[Row]:
    """Measure decoding with several numbers of rows, the time to the first token, and, where enough
    time is left, XLA's options."""
    rows = []
    for kind, num_rows, prompt in TINY_ENGINE_JOBS if rehearse else ENGINE_JOBS:
        job = {"kind": kind, "rows": num_rows, "prompt": prompt, "rehearse": rehearse}
        row = {"name": ENGINE_NAMES[kind].format(**job), "is_headline": kind != "options", **job}
        needed = 0.0 if row["is_headline"] else ENGINE_SECONDS
        rows.append(row | budget.run(child, job, ENGINE_SECONDS, reserved, needed))
    return rows


def headlines_first(
    cases: Mapping[str, Case], platform: str, limit: int | None = None
) -> dict[str, Case]:
    """The cases for the platform, headlines first, at most `limit`."""
    fitting = [name for name, case in cases.items() if backend_names(case, platform)]
    fitting.sort(key=lambda name: not cases[name].is_headline)
    return {name: cases[name] for name in fitting[:limit]}
