"""The server as a process: its startup, and every way it shuts down."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import CheckpointError, ConfigError, EngineConfig
from jaxinfer.serving import process
from jaxinfer.serving.config import ServingConfig, TlsConfig
from tests.support.faulty_server import GO
from tests.support.paths import ROOT, SCRIPTS
from tests.support.tiny_server import OPTIONS, checkpoint

LONG, SHORT = 480, 40  # tokens: about 10 s and 1 s of slow steps
WAIT_S = 60.0


def options(**serving: Any) -> list[str]:
    """Overrides `key.path=value` for the tiny engine, compiled before it serves, on free ports."""
    serving = {"http_port": 0, "grpc_port": 0, "model_name": "tiny"} | serving
    tables = {**OPTIONS, "warm_up": True, "serving": serving}
    flat = []
    for key, value in tables.items():
        table = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else None
        flat += (table or {key: value}).items()
    return [f"{key}={'none' if value is None else json.dumps(value)}" for key, value in flat]


class Server:
    """A process under test; `log` is its stderr."""

    def __init__(self, folder: Path, fault: str, **serving: Any):
        self._log = folder / "stderr"
        command = [sys.executable, "-m", "tests.support.faulty_server", fault, checkpoint()]
        with self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*map(str, command), *options(**serving)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.http = self.grpc = ""

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_announced(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        about = json.loads(line)
        self.http, self.grpc = about["http"], about["grpc"]
        return about

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def until(self, is_so: Callable[[], Any]) -> None:
        """Wait for a condition that the running server is to fulfil."""
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def exit_code(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.http + path, timeout=WAIT_S)

    def metrics(self) -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
        }

    def entries(self) -> list[dict[str, Any]]:
        """The entries of the request log."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]


@contextlib.contextmanager
def serving(folder: Path, fault: str, **config: Any) -> Iterator[Server]:
    """A server that is ready; it is killed at the end if it is still running."""
    server = Server(folder, fault, **config)
    try:
        server.wait_until_announced()
        yield server
    finally:
        end(server)


def end(server: Server) -> None:
    server.process.kill()
    server.process.wait()
    assert server.process.stdout is not None
    server.process.stdout.close()


class Answer:
    """An unfinished streamed completion."""

    def __init__(self, server: Server, max_tokens: int):
        body = {"prompt": "a prompt", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False  # its last event came
        self._client = httpx.Client(timeout=WAIT_S)
        request = self._client.build_request("POST", server.http + "/v1/completions", json=body)
        self._response = self._client.send(request, stream=True)
        assert self._response.status_code == 200
        self._lines = self._response.iter_lines()

    def read_one(self) -> bool:
        """Read up to the next event; False at the end of the stream."""
        for line in self._lines:
            if line == "data: [DONE]":
                self.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                self.error = event.get("error") or self.error
                for choice in event.get("choices", ()):
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                return True
        return False

    def read_all(self) -> None:
        """Read to the end, with or without an error."""
        with contextlib.suppress(httpx.TransportError):
            while self.read_one():
                pass
        self.close()

    def close(self) -> None:
        self._response.close()
        self._client.close()


def grpc_health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def status(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=WAIT_S).status_code
    except httpx.TransportError:
        return None


def test_loading_server_is_live_but_not_ready(tmp_path):
    port = free_port()
    (checkpoint().parent / GO).unlink(missing_ok=True)
    server = Server(tmp_path, "load_waits", http_port=port, grpc_port=None)
    url = f"http://127.0.0.1:{port}"
    try:
        server.until(lambda: status(f"{url}/health/live") == 200)
        server.until(lambda: "compiling" in server.log)
        for path in ("/health/ready", "/v1/models", "/metrics"):
            answer = httpx.get(url + path, timeout=WAIT_S)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert "loaded" in answer.json()["error"]["message"]
        server.signal(signal.SIGTERM)  # there are no requests, so it need not wait for the load
        assert server.exit_code() == 0
        assert "while the model was loading" in server.log
    finally:
        end(server)


CLIENT = """
import http.client, json, sys, time
body = {"prompt": "a prompt", "max_tokens": 480, "stream": True, "ignore_eos": True}
connection = http.client.HTTPConnection(sys.argv[1])
headers = {"content-type": "application/json"}
connection.request("POST", "/v1/completions", json.dumps(body), headers)
response = connection.getresponse()
for line in response:
    print(line.decode(), end="", flush=True)
"""


def test_sigterm_under_load_drains_after_clients_are_killed(tmp_path):
    with serving(tmp_path, "slow", drain_s=2.5) as server:
        assert server.get("/health/ready").status_code == 200
        assert grpc_health(server.grpc) == health_pb2.HealthCheckResponse.SERVING
        assert server.metrics()["jaxinfer_health", "serving"] == 1
        a_killed_client_gives_its_pages_back(server)

        short, long = Answer(server, SHORT), Answer(server, LONG)
        for answer in (short, long):
            assert answer.read_one()
        server.signal(signal.SIGTERM)
        server.until(lambda: "SIGTERM: draining 2 requests for at most 2.5 s" in server.log)
        refused = httpx.post(server.http + "/v1/completions", json={"prompt": "a"}, timeout=WAIT_S)
        assert refused.status_code == 503 and "shutting down" in refused.text
        assert server.get("/health/ready").status_code == 503
        assert server.get("/health/live").status_code == 200
        assert grpc_health(server.grpc) == health_pb2.HealthCheckResponse.NOT_SERVING
        short.read_all()
        assert short.finish_reason == "length" and short.is_done and short.error is None
        long.read_all()
        assert long.error is not None and "shut down" in long.error["message"]
        assert server.exit_code() == 0
        ends = [(e["finish_reasons"], e.get("error")) for e in server.entries()]
        assert ends == [([], "cancelled"), (["length"], None), ([], "unavailable")]
        assert "Traceback" not in server.log


def a_killed_client_gives_its_pages_back(server: Server) -> None:
    address = server.http.removeprefix("http://")
    client = subprocess.Popen([sys.executable, "-c", CLIENT, address], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline().startswith(b"data: ")
    before = server.metrics()
    assert before["jaxinfer_pages", "owned"] > 0 and before["jaxinfer_requests_running",] == 1
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    server.until(lambda: server.metrics()["jaxinfer_pages", "owned"] == 0)
    now = server.metrics()
    assert now["jaxinfer_requests_total", "cancelled", "http"] == 1
    assert now["jaxinfer_output_tokens_total",] < LONG
    assert now["jaxinfer_requests_in_flight",] == 0


def test_second_signal_stops_at_once(tmp_path):
    with serving(tmp_path, "slow", grpc_port=None) as server:
        answer = Answer(server, LONG)
        assert answer.read_one()
        server.signal(signal.SIGINT)
        server.until(lambda: "SIGINT: draining" in server.log)
        server.signal(signal.SIGTERM)
        assert server.exit_code(5) == 128 + signal.SIGTERM
        answer.read_all()
        assert not answer.is_done
        assert "SIGTERM again" in server.log


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("die", "the device is gone"), ("stick", "a step has not returned")],
)
def test_lost_engine_fails_its_requests_and_ends_the_process(tmp_path, fault, reason):
    with serving(tmp_path, fault, watchdog_s=1.0) as server:
        answers = [Answer(server, LONG) for _ in range(2)]
        for answer in answers:
            answer.read_all()
            assert answer.error is not None and reason in answer.error["message"]
            assert answer.error["type"] == "server_error"
        assert server.exit_code() == process.EXIT_FATAL == 70
        log = server.log
        assert reason in log and "the stacks of all threads" in log
        assert "most recent call first" in log and "ended with exit code 70" in log
        assert ("in stick" in log) == (fault == "stick")  # where it is stuck
        assert {entry["error"] for entry in server.entries()} == {"internal"}


def test_stuck_step_does_not_delay_shutdown_without_a_watchdog(tmp_path):
    with serving(tmp_path, "stick", watchdog_s=0, drain_s=0.2, grpc_port=None) as server:
        answers = [Answer(server, LONG) for _ in range(2)]
        server.until(lambda: server.metrics()["jaxinfer_output_tokens_total",] >= 40)
        server.signal(signal.SIGTERM)
        for answer in answers:
            answer.read_all()
            assert answer.error is not None and "shut down" in answer.error["message"]
        assert server.exit_code() == process.EXIT_FATAL
        assert "the engine's thread did not end" in server.log and "in stick" in server.log


def test_process_with_a_blocked_event_loop_still_ends(tmp_path):
    with serving(tmp_path, "freeze", watchdog_s=0.5, grpc_port=None) as server:
        answer = Answer(server, LONG)
        answer.read_all()
        assert not answer.is_done
        assert server.exit_code() == process.EXIT_FATAL
        assert "a step has not returned" in server.log


def test_server_prints_its_addresses_and_ends_on_ctrl_c(tmp_path):
    script = SCRIPTS / "serve.py"
    flags = [f"--set={option}" for option in options() if "port" not in option]
    flags += ["--http_port=0", "--grpc_port=none", f"--model={checkpoint()}"]
    with subprocess.Popen(
        [sys.executable, str(script), *flags, "--set", "serving.model_name=named"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        try:
            about = json.loads(running.stdout.readline() or running.stderr.read())
            assert about["grpc"] is None and about["pid"] == running.pid
            assert about["model"] == "named"
            assert httpx.get(about["http"] + "/health/ready").status_code == 200
            running.send_signal(signal.SIGINT)
            assert running.wait(30) == 0
            assert f"page {about['http']}/" in running.stderr.read()
        finally:
            running.kill()


def test_port_in_use_is_reported_before_loading():
    script = SCRIPTS / "serve.py"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = subprocess.run(
            [sys.executable, str(script), "--model=/no/model", f"--http_port={port}"],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: cannot listen on 127.0.0.1:") and str(port) in line
    assert "serving.http_port" in line


def refusal(**serving: Any) -> str:
    """The error of a server with these options, whose model does not exist."""
    config = ServingConfig(**{"http_port": 0, "grpc_port": 0, **serving})
    handlers = [signal.getsignal(number) for number in process.SIGNALS]
    with pytest.raises(ConfigError) as caught:
        process.serve("/no/model", EngineConfig(), config)
    assert [signal.getsignal(number) for number in process.SIGNALS] == handlers
    assert "/no/model" not in str(caught.value)
    return str(caught.value)


def test_bad_options_are_reported_before_the_model_is_opened(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert "serving.grpc_port" in refusal(grpc_port=port)
    assert "serving.http_port" in refusal(http_port=(port := free_port()), host="192.0.2.1")
    assert str(port) in refusal(http_port=port, grpc_port=port)
    assert "no.such.host.invalid" in refusal(host="no.such.host.invalid")
    keys = tmp_path / "keys"
    assert str(keys) in refusal(api_keys_file=str(keys))
    pem = tmp_path / "pem"
    pem.write_text("no certificate")
    assert str(pem) in refusal(tls=TlsConfig(str(pem), str(pem)))


def test_missing_package_is_named_with_its_extra():
    script = SCRIPTS / "serve.py"
    code = (
        "import runpy, sys; "
        "sys.modules['uvicorn'] = None; sys.argv = ['serve.py', '--model=/no']; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "uvicorn" in line and "jaxinfer[serve]" in line


def test_tracing_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxinfer.serving.tracing", None)
    monkeypatch.delattr("jaxinfer.serving.tracing", raising=False)
    assert "jaxinfer[tracing]" in refusal(otlp_endpoint="http://127.0.0.1:1")


def test_unopenable_model_ends_startup_and_closes_the_port(tmp_path):
    port = free_port()
    config = ServingConfig(http_port=port, grpc_port=None)
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        process.serve(str(tmp_path / "none.gguf"), EngineConfig(), config)
    socket.create_server(("127.0.0.1", port)).close()  # it is free again
