"""The two sides of the serving cases: `jaxinfer serve` in one process, and the engine in another.

Both load the same model with the same options. The reference waits for commands on its stdin while
the server is measured, and the server idles while the reference is measured, so that they
alternate.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0  # loading and compiling
STOP_TIMEOUT_S = 60.0


class ServerError(RuntimeError):
    """A process that did not start, or that ended unexpectedly."""


class _Process:
    """A child that prints one JSON object a line on stdout; its stderr goes to a file."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path):
        self.log = log
        command = [sys.executable, "-m", module, *arguments]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def read_object(self, timeout_s: float) -> dict[str, Any]:
        """Read the next JSON object on stdout; other lines are skipped."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ServerError(f"no answer in {timeout_s} s; see {self.log}") from None
            if line is None:
                end = self.log.read_text("utf-8", "replace")[-2000:]
                raise ServerError(f"the process ended with {self.process.wait()}:\n{end}")
            with contextlib.suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    return found

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def stop(self) -> int:
        """End the process as a supervisor would, and kill it if that takes too long; return its
        exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Server(_Process):
    """A running server with both endpoints open, ready to answer."""

    def __init__(self, model: str, preset: str | None, settings: Sequence[str], log: Path):
        arguments = [f"--model={model}", "--http_port=0", "--grpc_port=0"]
        arguments += [f"--config={preset}"] if preset else []
        arguments += [f"--set={text}" for text in settings]
        super().__init__("jaxinfer", ["serve", *arguments], log)
        try:
            ready = self.read_object(START_TIMEOUT_S)
            self.http, self.grpc = str(ready["http"]), str(ready["grpc"])
            self.model = str(ready["model"])
        except BaseException:
            self.stop()
            raise

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(self._status("VmRSS")) * 1024

    @property
    def num_threads(self) -> int:
        return int(self._status("Threads"))

    @property
    def num_files(self) -> int:
        """The number of open files, including connections."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels, as the server writes it."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def _status(self, name: str) -> str:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.split()[0]
        raise ServerError(f"no {name} in the process's status")


class ReferenceEngine(_Process):
    """The engine alone in its own process, for comparison with the server."""

    def __init__(self, model: str, preset: str | None, settings: Sequence[str], log: Path):
        arguments = [f"--model={model}", *(f"--set={text}" for text in settings)]
        arguments += [f"--config={preset}"] if preset else []
        super().__init__("jaxinfer.tools.bench.reference", arguments, log)
        try:
            self.read_object(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def generate(self, prompts: Sequence[str | list[int]], max_tokens: Sequence[int]) -> float:
        """Time `LLM.generate` for all prompts together."""
        return self._measure({"prompts": prompts, "max_tokens": max_tokens})

    def first_token(self, prompt: str | list[int]) -> float:
        """Time from `Engine.add` on an idle engine to the step that returns the first token."""
        return self._measure({"prompt": prompt})

    def _measure(self, command: dict[str, Any]) -> float:
        self.send(command)
        return self.read_object(START_TIMEOUT_S)["seconds"]


@contextlib.contextmanager
def running(process: Server | ReferenceEngine) -> Iterator[None]:
    """Stop the process at the end of the context; a server must end with status 0. Its log is kept
    after a failure."""
    try:
        yield
    except BaseException:
        process.stop()
        raise
    status = process.stop()
    if isinstance(process, Server) and status != 0:
        raise ServerError(f"the server ended with status {status}; see {process.log}")
    shutil.rmtree(process.log.parent)
