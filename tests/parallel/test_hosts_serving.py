"""The server on two processes with two CPU devices each: one endpoint, and how both end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import from_mapping
from jaxinfer.options import merge
from jaxinfer.serving.process import EXIT_FATAL
from tests.parallel.test_hosts import STARTED_S, free_port
from tests.support import tiny_server
from tests.support.child_process import IN_HASTE
from tests.support.paths import SCRIPTS

pytestmark = [pytest.mark.long, pytest.mark.ci, pytest.mark.once]

SCRIPT = SCRIPTS / "serve.py"
OPTIONS = merge(tiny_server.OPTIONS, {"max_model_len": 4096, "cache": {"num_pages": 512}})
MESH = {"tensor": 4}
PROMPT = "a prompt"
MANY = 4000  # tokens: some 10 s
LOST_S = (
    20.0  # from the death of one process to the end of process 0, which tells its clients first
)


def command(process_id: int, port: int) -> list[str]:
    """Return the command line of a process; both differ in their number alone."""
    options = {**OPTIONS, "warm_up": True, "mesh": MESH, "serving": {"model_name": "tiny"}}
    flat = {
        f"{key}.{name}" if name else key: value
        for key, table in options.items()
        for name, value in (table.items() if isinstance(table, dict) else [("", table)])
    }
    settings = [f"--set={key}={json.dumps(value)}" for key, value in flat.items()]
    hosts = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={process_id}"]
    ports = ["--http_port=0", "--grpc_port=none", "--cpu_devices=2"]
    model = f"--model={tiny_server.checkpoint()}"
    return [sys.executable, str(SCRIPT), model, *settings, *hosts, *ports]


class Pair:
    """Two processes that serve together; `http` is the address that process 0 announced."""

    def __init__(self, output: Path):
        self.paths = [output / f"stderr{process_id}" for process_id in range(2)]
        self.processes: list[subprocess.Popen[str]] = []
        port = free_port()
        environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {IN_HASTE}"}
        for process_id, path in enumerate(self.paths):
            with path.open("w") as stderr:
                process = subprocess.Popen(
                    command(process_id, port),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            self.processes.append(process)

    def stdout(self, process_id: int) -> IO[str]:
        stdout = self.processes[process_id].stdout
        assert stdout is not None
        return stdout

    def errors(self, process_id: int) -> str:
        return self.paths[process_id].read_text(errors="replace")

    def wait_until_announced(self) -> None:
        line = self.stdout(0).readline()
        assert line, self.errors(0) + self.errors(1)
        self.http = json.loads(line)["http"]

    def exit_codes(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [p.wait(max(0.0, deadline - time.monotonic())) for p in self.processes]


@contextlib.contextmanager
def serving(output: Path) -> Iterator[Pair]:
    """Start a pair, wait until it serves, and kill it at the end if it still runs."""
    pair = Pair(output)
    try:
        pair.wait_until_announced()
        yield pair
    finally:
        for process in pair.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def completion(http: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(http + "/v1/completions", json=body, timeout=STARTED_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def completion_of_one_process() -> str:
    llm = LLM(tiny_server.checkpoint(), from_mapping(OPTIONS), show_progress=False)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    return llm.generate(PROMPT, params)[0].outputs[0].text


def read_until_it_ends(lines: Iterator[str]) -> dict[str, Any]:
    """Return the last event of a stream before `[DONE]`; empty if there is none."""
    last: dict[str, Any] = {}
    with contextlib.suppress(httpx.RemoteProtocolError):  # the caller checks for a cut-off stream
        for line in lines:
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
    return last


def test_process_0_alone_serves_the_tokens_of_one_process_until_sigterm(tmp_path):
    expected = completion_of_one_process()
    with serving(tmp_path) as pair:
        assert completion(pair.http) == expected
        pair.processes[0].send_signal(signal.SIGTERM)
        assert pair.exit_codes(30.0) == [0, 0], pair.errors(0) + pair.errors(1)
        assert pair.stdout(0).read() == pair.stdout(1).read() == ""  # no address of process 1
        assert "serving tiny" in pair.errors(0) and "serving tiny" not in pair.errors(1)
        assert "Traceback" not in pair.errors(0) + pair.errors(1)


def test_killed_process_ends_the_streams_and_the_other_process(tmp_path):
    body = {"prompt": PROMPT, "max_tokens": MANY, "stream": True, "ignore_eos": True}
    with serving(tmp_path) as pair:
        url = pair.http + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=LOST_S) as response:
            lines = response.iter_lines()
            for _ in range(20):  # events, each followed by an empty line
                assert next(lines).startswith("data: {") and next(lines) == ""
            killed_at = time.monotonic()
            pair.processes[1].kill()
            last = read_until_it_ends(lines)
        assert "process 1 (127.0.0.1:" in last["error"]["message"]
        assert last["error"]["type"] == "server_error"
        assert pair.exit_codes(LOST_S) == [EXIT_FATAL, -signal.SIGKILL]
        assert time.monotonic() - killed_at < LOST_S
        errors = pair.errors(0)
        assert errors.count("jaxinfer: process 1 (127.0.0.1:") == 1, errors
        assert "Traceback" not in errors and "Thread 0x" not in errors, errors
