"""The child process of the device check and of the tuner, which runs their jobs.

    python -m jaxinfer.tools.device_check.worker

The status of a result is `measured`, with the figures; `declined` (a backend does not support the
case, or there is nothing to compare with); or `failed`, with the reason. The parent adds "crashed",
"timed out" and "not run".
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
    """Run a job of the kind that it names and return its figures."""
    if job["kind"] in ("decode", "first_token", "options"):
        from jaxinfer.tools.device_check import engine

        return engine.run_engine_job(_bench(job["rehearse"]), job)
    if job["kind"] == "tune":
        from jaxinfer.tools.tuner import search

        return search.tune(job)
    from jaxinfer.tools.device_check import kernels

    return getattr(kernels, job["kind"])(job)


def handle(job: Job, send_event: Callable[[Job], None]) -> Job:
    """Run a job and return its result; an error becomes a status."""
    try:
        return {"status": "measured", **run_job(job)}
    except NotImplementedError as why:
        return {"status": "declined", "reason": " ".join(str(why).split())[:300]}
    except Exception as error:
        trace = traceback.format_exc()[-4000:]
        return {"status": "failed", "reason": reason_of(error), "trace": trace}


def reason_of(error: Exception) -> str:
    """The first line of an error, or the last line of the traceback that it contains, as a
    callback's does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else ""
    if "Traceback" in reason:
        named = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception)\b", line)]
        reason = named[-1] if named else reason
    return f"{type(error).__name__}: {reason}"[:300]


if __name__ == "__main__":
    serve_jobs(handle)
