"""A child process that runs jobs one at a time under a watchdog, so that a compiler or a kernel
that crashes or hangs costs one job and not the run.

The child calls `serve_jobs`. Its standard output carries one JSON event a line to the parent; other
output to it is redirected to standard error. The parent uses a `JobProcess`.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 120  # importing JAX, opening a topology or a device
STDERR_TAIL = 2000  # characters of standard error that a failed job reports

Event = dict[str, Any]


def serve_jobs(handle: Callable[[Event, Callable[[Event], None]], Event]) -> None:
    """Run in the child: answer every job on standard input with `handle(job, send_event)`.

    `send_event(event)` reports progress and restarts the job's time limit.
    """
    line_out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def send_event(event: Event) -> None:
        line_out.write(json.dumps(event) + "\n")

    send_event({"ready": True})
    for line in sys.stdin:
        send_event({"done": handle(json.loads(line), send_event)})


class JobProcess:
    """The parent's end. `run` starts the process where none is running; `close` ends it."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str | None]):
        self.command = [str(part) for part in command]
        self.environment = environment  # None removes a variable
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader: threading.Thread | None = None
        self._folder = tempfile.TemporaryDirectory()

    def run(
        self,
        job: Event,
        seconds: float,
        on_event: Callable[[Event], None] = lambda event: None,
        within: float = math.inf,
    ) -> Event:
        """Run a job and return the child's answer.

        The answer is `{"status": "crashed" | "timed out", "reason": ...}` where the process failed;
        the next job then gets a new process. `seconds` limits the job alone, `within` the job and
        the start of the process together.
        """
        end = time.monotonic() + within
        if self._process is None:
            self._start()
            answer = self._wait_for(min(START_SECONDS, within), on_event, until="ready")
            if isinstance(answer, dict):
                return answer
            seconds = min(seconds, max(0.0, end - time.monotonic()))
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._ended("crashed", 0)
        return self._wait_for(seconds, on_event, until="done")

    def close(self) -> None:
        """End the process and its descendants, and remove its files."""
        self._kill()
        self._folder.cleanup()

    def __enter__(self) -> JobProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = Path(self._folder.name)
        given = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton")} | dict(self.environment)
        lines: queue.Queue[str] = queue.Queue()
        with open(folder / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                self.command,
                env={name: value for name, value in given.items() if value is not None},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")  # end of output

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        self._process, self._lines = process, lines

    def _wait_for(self, seconds: float, on_event: Callable[[Event], None], until: str) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return self._ended("timed out", seconds)
            if not line:
                return self._ended("crashed", seconds)
            event = json.loads(line)
            if until in event:
                return event[until]
            on_event(event)
            deadline = time.monotonic() + seconds

    def _ended(self, status: str, seconds: float) -> Event:
        self._kill()
        path = Path(self._folder.name) / "stderr"
        stderr_tail = path.read_text("utf-8", "replace").strip()[-STDERR_TAIL:]
        if status == "timed out":
            return {"status": status, "reason": f"it took over {seconds:g} s", "trace": stderr_tail}
        lines = [line for line in stderr_tail.splitlines() if line.strip()]
        reason = lines[-1][:300] if lines else "the process died without any message"
        return {"status": status, "reason": reason, "trace": stderr_tail}

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # the process group is gone
            process.kill()
        process.wait()
        assert self._reader is not None
        self._reader.join(5)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue
