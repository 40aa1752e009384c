"""Groups of two real processes with four CPU devices each.

They generate the tokens of a single process, and all end when one is killed or diverges.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM
from tests.support import host_process
from tests.support.paths import ROOT
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint

MODEL = TinyLlama(hidden_size=64, intermediate_size=128, num_heads=8, num_kv_heads=2)
MESHES = [
    {"tensor": 8},
    {"expert": 2, "tensor": 4},
    {"pipe": 2, "tensor": 4},
    {"seq": 4, "tensor": 2},
]
LOST_S = 5.0  # from the death of one process to the end of the others
STARTED_S = 300.0  # start-up on a busy machine


def free_port() -> int:
    """Return the first of two free neighbouring ports: the coordinator's and the channel's."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two free ports")


class Group:
    """Two processes and their output."""

    def __init__(self, output: Path, *, by_slurm: bool = False, **job: Any):
        self.processes, self.paths = [], []
        port = free_port()
        for process_id in range(2):
            hosts: dict[str, Any] = {}
            if not by_slurm:
                address = f"127.0.0.1:{port}"
                hosts = {"coordinator": address, "num_processes": 2, "process_id": process_id}
            paths = [output / f"{kind}{process_id}" for kind in ("out", "err")]
            environment = {**os.environ, "JAX_COORDINATOR_PORT": str(port)}
            environment |= slurm_variables(process_id) if by_slurm else {}
            with paths[0].open("w") as out, paths[1].open("w") as err:
                command = [
                    sys.executable,
                    "-m",
                    host_process.__name__,
                    json.dumps({"hosts": hosts, **job}),
                ]
                process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            self.processes.append(process)
            self.paths.append(paths)

    def wait_for(self, line: str) -> None:
        """Wait until process 0 has printed the line."""
        deadline = time.monotonic() + STARTED_S
        while line not in self.lines(0):
            for i, process in enumerate(self.processes):
                assert process.poll() is None, f"process {i} has ended:\n{self.errors(i)}"
            assert time.monotonic() < deadline, self.errors(0)
            time.sleep(0.02)

    def lines(self, process_id: int) -> list[str]:
        return self.paths[process_id][0].read_text().splitlines()

    def found(self, process_id: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(process_id) if line.startswith("{")]

    def errors(self, process_id: int) -> str:
        return self.paths[process_id][1].read_text()

    def end_of(self, process_id: int, timeout_s: float = LOST_S) -> int:
        return self.processes[process_id].wait(timeout_s)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def slurm_variables(process_id: int) -> dict[str, str]:
    """Return the variables by which jax detects Slurm: one step of two tasks on this machine."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process_id),
        "SLURM_LOCALID": "0",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(MODEL, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokens(folder, tmp_path_factory):
    """A group that has printed its results and then generates tokens without end."""
    tuned = write_checkpoint(dataclasses.replace(MODEL, seed=1), tmp_path_factory.mktemp("tuned"))
    folders = [str(folder), str(tuned)]
    group = Group(tmp_path_factory.mktemp("tokens"), folders=folders, meshes=MESHES)
    try:
        group.wait_for("READY")
        yield group
    finally:
        group.kill()


def start(tmp_path: Path, *, num_steps: int = -1, fault: str = "", **options) -> Group:
    return Group(tmp_path, num_steps=num_steps, fault=fault, **options)


def test_two_processes_generate_the_tokens_of_one(tokens, folder):
    llm = LLM(folder, host_process.config_for({}), show_progress=False)
    expected = host_process.generate_tokens(llm)
    assert len({tuple(ids) for ids in expected}) == host_process.NUM_PROMPTS
    found = {str(f["mesh"]): f for f in tokens.found(0) if "mesh" in f}
    for mesh in MESHES:
        assert found[str(mesh)]["tokens"] == expected, mesh
        assert found[str(mesh)]["preemptions"] > 0
        assert found[str(mesh)]["ring"] == mesh.get("seq", 1), mesh


def test_small_mesh_and_differing_options_are_refused_by_both(tokens):
    for process_id in range(2):
        mesh, options, model = (f["refused"] for f in tokens.found(process_id) if "refused" in f)
        assert "the mesh has 4 devices (tensor 4), but the 2 processes have 8 together" in mesh
        assert "config.scheduler.max_num_seqs is 4 in process 0 and 5 in process 1" in options
        assert "the checkpoint's fingerprint is " in model


def test_killed_follower_ends_process_0(tokens):
    """Runs last of the tests that need the group."""
    tokens.processes[1].kill()
    code = tokens.end_of(0)
    assert code == 70, tokens.errors(0)
    lines = [line for line in tokens.errors(0).splitlines() if "jaxinfer:" in line]
    assert "process 1 (127.0.0.1:" in lines[0] and "is lost: its connection closed" in lines[0]


def test_script_prints_only_answers_on_stdout(folder):
    """The output of gloo, which writes to stdout, is redirected to stderr."""
    port = free_port()
    command = [sys.executable, "scripts/generate.py", f"--model={folder}", "--prompt=Hi"]
    command += ["--format=jsonl", "--max_tokens=2", "--cpu_devices=1", "--set", "mesh.tensor=2"]
    for option in ("warm_up=false", "cache.num_pages=8", "max_model_len=64"):
        command += ["--set", option]
    command += [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    processes = [
        subprocess.Popen(
            [*command, f"--process_id={i}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(2)
    ]
    try:
        out = [process.communicate(timeout=STARTED_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert json.loads(out[0])["prompt"] == "Hi" and out[1] == ""


def test_killed_process_0_ends_the_others(tmp_path):
    """The job is one that jax detects itself."""
    group = start(tmp_path, by_slurm=True)
    try:
        group.wait_for("READY")
        group.processes[0].kill()
        assert group.end_of(1) != 0  # 70, unless jax's own service ends it first
        assert "process 0 (" in group.errors(1) and "is lost: its" in group.errors(1)
    finally:
        group.kill()


def test_follower_out_of_step_ends_all_and_names_the_step(tmp_path):
    group = start(tmp_path, fault="wrong")
    try:
        group.wait_for("READY")
        assert [group.end_of(i) for i in range(2)] == [70, 70]
        for process_id in range(2):
            text = group.errors(process_id)
            assert "process 1 is out of step with process 0: after step 24 of process 0" in text
    finally:
        group.kill()


def test_uncaught_error_ends_all(tmp_path):
    group = start(tmp_path, fault="raises")
    try:
        group.wait_for("READY")
        assert [group.end_of(i) for i in range(2)] == [1, 70]
        assert "ZeroDivisionError: on purpose" in group.errors(0).splitlines()[-1]
        assert "process 0 (127.0.0.1:" in group.errors(1)
        assert "ended: ZeroDivisionError: on purpose" in group.errors(1)
    finally:
        group.kill()


def test_follower_survives_sigterm_and_ends_with_process_0(tmp_path):
    group = start(tmp_path, num_steps=40)
    try:
        group.wait_for("READY")
        group.processes[1].send_signal(signal.SIGTERM)
        assert [group.end_of(i, 10.0) for i in range(2)] == [0, 0]
        assert group.found(0) == [{"sums": 40}] and group.found(1) == [{"stopped": True}]
        assert "process 1 ends when process 0 does" in group.errors(1)
    finally:
        group.kill()
