"""The offline benchmark runs small cases without a peer and writes figures."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.ci
@pytest.mark.once
def test_the_offline_bench_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "scripts/bench_offline.py", "--peer=none", f"--json={out}"]
    command += ["--cases=one_stream,prefill", "--repeats=1", "--config=demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text("utf-8"))
    assert {m["case"] for m in result["measures"]} == {"one_stream", "prefill"}
    assert all(m["value"] > 0 for m in result["measures"])
    assert result["versions"]["jax"] and result["machine"]["cores"] >= 1
    assert "one_stream" in done.stdout


def test_the_offline_bench_refuses_an_unknown_case():
    command = [sys.executable, "scripts/bench_offline.py", "--cases=two_streams"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "two_streams" in done.stderr + done.stdout
