"""The child process of the device check and of the tuner: does the jobs that it is fed.

    python -m jaxinfer.tools.device_check.worker

A result's status: `measured` with what was found, `declined` (a backend does not take the case, or
there is nothing to compare with) or `failed`, with the reason; and of the parent: crashed, timed
out, not run.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

from jaxinfer.tools.job_process import serve_jobs

Job = dict[str, Any]


@functools.cache
def _bench(rehearse: bool) -> Any:
    from jaxinfer.tools.device_check import engine

    return engine.bench_for({"rehearse": rehearse})


def run_job(job: Job) -> dict[str, Any]:
    """What a job found; its `kind` says what it is."""
    if job["kind"] in ("decode", "first_token", "options"):
        from jaxinfer.tools.device_check import engine

        return engine.run(_bench(job["rehearse"]), job)
    if job["kind"] == "tune":
        from jaxinfer.tools.tuner import search

        return search.tune(job)
    from jaxinfer.tools.device_check import kernels

    return getattr(kernels, job["kind"])(job)


def handle(job: Job, tell: Callable[[Job], None]) -> Job:
    """The result of a job, whatever became of it."""
    try:
        return {"status": "measured", **run_job(job)}
    except NotImplementedError as why:
        return {"status": "declined", "reason": " ".join(str(why).split())[:300]}
    except Exception as error:
        trace = traceback.format_exc()[-4000:]
        return {"status": "failed", "reason": reason_of(error), "trace": trace}


def reason_of(error: Exception) -> str:
    """Its first line; of one that holds a traceback, as a callback's does, what that ends with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = lines[0] if lines else ""
    if "Traceback" in telling:
        named = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception)\b", line)]
        telling = named[-1] if named else telling
    return f"{type(error).__name__}: {telling}"[:300]


if __name__ == "__main__":
    serve_jobs(handle)
