"""The compile gate: its data, its verdicts, its child processes.

Only the last test needs the compilers themselves.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import load_config, preset_names
from jaxinfer.models import HF_FAMILIES
from jaxinfer.tools import job_process, kernel_cases
from jaxinfer.tools.compile_gate import matrix as matrix_module
from jaxinfer.tools.compile_gate import report as report_module
from jaxinfer.tools.compile_gate import run as compile_run
from tests.support.paths import ROOT

CompileJob, load_matrix, jobs_for = (
    matrix_module.CompileJob,
    matrix_module.load_matrix,
    matrix_module.jobs_for,
)


def test_every_target_cites_sources_and_fits_its_platform():
    assert set(matrix_module.target_names()) == {
        "v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "cpu",
    }  # fmt: skip
    for name in matrix_module.target_names():
        target = matrix_module.load_target(name)
        text = (matrix_module.TARGETS / f"{name}.toml").read_text("utf-8")
        assert text.startswith("# ") and "memory" in text.partition("platform")[0].lower()
        assert 2**33 < target.limit_bytes <= target.memory_bytes < 2**38
        assert target.platform in ("tpu", "gpu", "cpu")
        assert "rates" in text.partition("platform")[0].lower()
        is_gpu = target.platform == "gpu"
        assert is_gpu == (target.network_rate is not None)
        if target.platform != "cpu":  # what a chip computes and reads a second, within reason
            assert 1e14 < target.flops["bfloat16"] < 2e15 and 5e11 < target.memory_rate < 1e13
            assert 1e10 < target.link_rate < target.memory_rate
        assert is_gpu == (target.compute_capability is not None)
        if is_gpu:
            assert f"device_memory_size: {target.memory_bytes}\n" in (target.target_config or "")


def test_the_matrix_covers_every_preset_for_an_accelerator():
    matrix = load_matrix()
    assert set(matrix["presets"]) == set(preset_names()) - {"demo"}
    for name in matrix["presets"]:
        assert load_config(name).dtype != "auto", "a type that does not depend on who compiles"


def test_matrix_errors_name_every_missing_reference(tmp_path):
    path = tmp_path / "matrix.toml"
    path.write_text(
        '[models]\n[presets.p]\nmodel = "nobody"\ntargets = ["h100", "h900"]\nwhole = []\n'
        '[presets.q]\nmodel = "noone"\ntargets = []\nwhole = ["v5e"]\n'
        '[meshes.m]\npreset = "r"\ntarget = "h100:4"\nset = []\n'
    )
    with pytest.raises(ValueError, match=r"'nobody'.*'h900'.*'noone'.*'v5e'.*meshes.m: no.*'r'"):
        load_matrix(path)


def test_every_decoder_has_a_structure_that_its_family_reads():
    """The presets' is Llama's, and Mistral's the same with a window, as Phi 3 and Gemma 2 have."""
    structures = load_matrix()["structures"]
    found = {"llama", "mistral", "mistral3", "olmo3", "gemma"}
    for name, table in structures.items():
        family = HF_FAMILIES[table["model_type"]]
        config = {key: value for key, value in table.items() if key != "like"}
        assert family.config_from_hf(config, {}).num_layers <= 2, name
        found.add(family.name)
    assert found == {family.name for family in HF_FAMILIES.values()} - {"bert"}


def case(**fields: Any) -> Any:
    blank = {"function": print, "arguments": (), "options": {}, "make": print, "bytes_moved": 0}
    return kernel_cases.Case(**blank, flops=0, tolerance=0, **fields)


def test_jobs_match_backends_to_chips_with_steps_first():
    steps = {"model": "m", "targets": ["h100", "h100:2x8", "v5p:2x2x4"], "whole": ["h100:2x8"]}
    ring = {"preset": "p", "target": "h100:4", "set": ["mesh.seq=4"]}
    matrix = {"presets": {"p": steps}, "meshes": {"ring": ring}}
    cases = {
        "o": {
            "all": case(),
            "plain": case(backends=("xla",), targets=("v5e", "h100")),
            "new": case(backends=("gpu", "hopper")),
        }
    }
    assert [job.id for job in jobs_for(matrix, ["h100", "v5e", "a100"], cases, ["p"], ["s"])] == [
        "h100 p",
        "h100:2x8 p",
        "h100:4 p ring",
        "h100 structure s",
        "h100 o/gpu all",
        "h100 o/xla plain",
        "h100 o/gpu new",
        "h100 o/hopper new",
        "v5e structure s",
        "v5e o/tpu all",
        "v5e o/xla plain",
        "a100 o/gpu all",
        "a100 o/gpu new",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("def cases(): return {}", "there are no cases"),
        ("def cases(): return {'a': 1}", "a is no Case"),
        ("", "cases"),
    ],
)
def test_broken_case_module_is_named_and_fails_the_gate(tmp_path, monkeypatch, text, reason):
    (tmp_path / "broken_op.py").write_text(text)
    monkeypatch.setattr(kernel_cases, "__path__", [*kernel_cases.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{kernel_cases.__name__}.broken_op", raising=False)
    importlib.invalidate_caches()
    assert "broken_op" in kernel_cases.operators()
    cases, broken = kernel_cases.load_all(["broken_op", "paged_attention"])
    assert list(cases) == ["paged_attention"]
    text, has_passed = report_module.report([], [], {}, broken)
    assert not has_passed and "kernel_cases/broken_op.py is broken" in text and reason in text


def test_steps_run_first_and_children_keep_their_target():
    step = lambda target: CompileJob(target, "step", "p", {})
    kernel = lambda target, name: CompileJob(target, "kernel", name, {})
    asked = [step("a"), kernel("a", "1"), kernel("a", "2"), step("b"), kernel("b", "1")]
    left = compile_run.JobQueue(asked)
    assert [left.take(None), left.take(None)] == [step("a"), step("b")]
    assert left.take(step("b")) == kernel("b", "1")
    assert left.take(step("a")) == kernel("a", "1")
    assert left.take(kernel("b", "1")) == kernel("a", "2")
    assert left.take(kernel("a", "1")) is None


def test_gpu_limits_are_read_from_the_target():
    target = matrix_module.load_target("h100")
    assert target.gpu_field("shared_memory_per_block_optin") == 232448
    assert target.device_kind == "NVIDIA H100 80GB HBM3"
    with pytest.raises(ValueError, match="has no colour"):
        target.gpu_field("colour")


def test_choice_is_all_none_or_known_names():
    assert matrix_module.choose("targets", "all", ["a", "b"]) == ["a", "b"]
    assert matrix_module.choose("targets", "none", ["a", "b"]) == []
    assert matrix_module.choose("targets", "b, a", ["a", "b"]) == ["b", "a"]
    for wrong in ("c", "", "a,c"):
        with pytest.raises(ValueError, match="--targets="):
            matrix_module.choose("targets", wrong, ["a", "b"])


STRUCTURE = CompileJob("h100", "structure", "s", {})
STRUCTURE_ROW = {
    "id": STRUCTURE.id,
    "status": "compiled",
    "seconds": 2.0,
    "num_layers": 2,
    "temporaries": 2**20,
    "launches": {"straight": 16, "loops": 1, "in_loops": 2},
}
STEP = CompileJob("h100", "step", "p", {"model": "m", "is_whole": True})
KERNEL = CompileJob("h100", "kernel", "o", {"backend": "gpu", "case": "decode"})
STEP_ROW = {
    "id": STEP.id,
    "status": "compiled",
    "seconds": 3.0,
    "memory": {
        "weights": 2**30,
        "pages": 2**31,
        "temporaries": 2**20,
        "total": 3 * 2**30,
        "limit": 4 * 2**30,
        "fits": True,
    },
    "tokens_cached": 64,
    "compiled": "all layers",
    "collectives_per_layer": {"all-reduce": {"count": 2.0, "bytes": 2**20}},
    "collective_problems": [],
    "operators_per_layer": 133,
    "per_layer": {"launches": 8.0, "loops": 0.0, "launches_in_loops": 0.0},
}  # fmt: skip
KERNEL_ROW = {
    "id": KERNEL.id,
    "status": "compiled",
    "seconds": 1.0,
    "launches": {"straight": 2, "loops": 0, "in_loops": 0},
    "registers": 128,
    "shared": 65536,
    "spills": 0,
}
BUDGETS = {STEP.id: {"launches": 8, "loops": 0, "launches_in_loops": 0}}


def test_rows_within_budget_pass():
    jobs, rows = [STEP, KERNEL, STRUCTURE], [STEP_ROW, KERNEL_ROW, STRUCTURE_ROW]
    text, has_passed = report_module.report(jobs, rows, BUDGETS, {})
    assert has_passed and "FAILED" not in text
    assert "128 registers, 64 KiB shared" in text and "3.00 of 4.00" in text
    assert "all-reduce 2" in text and "16 + 1 loops of 2" in text


@pytest.mark.parametrize(
    ("job", "row", "change", "reason"),
    [
        (STEP, STEP_ROW, {"per_layer": {"launches": 9.0, "loops": 0.0, "launches_in_loops": 0.0}},
         "launches a layer: 9, recorded 8"),
        (STEP, STEP_ROW, {"per_layer": {"launches": 8.0, "loops": 1.0, "launches_in_loops": 0.0}},
         "loops a layer: 1, recorded 0"),
        (STEP, STEP_ROW, {"per_layer": STEP_ROW["per_layer"] | {"collectives": 3.0}},
         "collectives a layer: 3, recorded 0"),
        (STEP, STEP_ROW, {"collective_problems": ["a layer adds the collectives 3 all-reduce"]},
         "a layer adds the collectives 3 all-reduce"),
        (STEP, STEP_ROW, {"memory": STEP_ROW["memory"] | {"fits": False, "total": 5 * 2**30}},
         "takes 5.00 of 4.00 GiB"),
        (STEP, STEP_ROW, {"id": "v4 p"}, "no recorded launches"),
        (KERNEL, KERNEL_ROW, {"spills": 64}, "spills 64 bytes"),
        (KERNEL, KERNEL_ROW, {"status": "refused", "reason": "Mosaic says no"}, "Mosaic says no"),
        (KERNEL, KERNEL_ROW, {"status": "declined", "reason": "head dim"}, "declined: head dim"),
        (STEP, STEP_ROW, {"status": "timed out", "reason": "300 s"}, "timed out: 300 s"),
        (STRUCTURE, STRUCTURE_ROW, {"status": "refused", "reason": "no"}, "refused: no"),
    ],
)  # fmt: skip
def test_failures_are_named_with_their_reason(job, row, change, reason):
    text, has_passed = report_module.report([job], [row | change], BUDGETS, {})
    assert not has_passed and reason in text.partition("FAILED")[2]


def test_recording_budgets_keeps_steps_that_did_not_run(tmp_path):
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps({"v4 q": {"launches": 1}, STEP.id: {"launches": 99}}))
    report_module.record_budgets([STEP_ROW, KERNEL_ROW], path)
    assert report_module.load_budgets(path) == {
        "v4 q": {"launches": 1},
        STEP.id: STEP_ROW["per_layer"],
    }
    assert not report_module.problems(STEP_ROW, report_module.load_budgets(path))


def test_budgets_are_recorded_for_steps_that_the_matrix_has():
    matrix = load_matrix()
    jobs = jobs_for(matrix, matrix_module.target_names(), {}, list(matrix["presets"]))
    assert set(report_module.load_budgets()) == {job.id for job in jobs}


WORKER = """
import os, sys, time
from jaxinfer.tools.job_process import serve_jobs

def handle(job, tell):
    print("to standard output")
    tell({{"compiling": job["name"]}})
    if job["name"] == "crash":
        print("LLVM ERROR: no such register", file=sys.stderr, flush=True)
        os._exit(134)
    if job["name"] == "hang":
        time.sleep(60)
    for i in range(4 if job["name"] == "slow" else 0):
        time.sleep(0.5)
        tell({{"at": i}})
    return {{"status": "compiled"}}

serve_jobs(handle)
"""


@pytest.fixture
def worker(tmp_path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format())
    return path


def test_crashing_or_hanging_compiler_costs_one_row(worker, monkeypatch):
    monkeypatch.setattr(matrix_module, "STEP_SECONDS", 1)
    names = ["fine", "crash", "again", "hang", "last"]
    jobs = [CompileJob(target, "step", name, {}) for target in ("h100", "v5e") for name in names]
    seen = []
    rows = compile_run.run_jobs(jobs, seen.append, worker)
    assert [row["id"] for row in rows] == [job.id for job in jobs]
    assert [row["status"] for row in rows[:5]] == [
        "compiled", "crashed", "compiled", "timed out", "compiled",
    ]  # fmt: skip
    assert rows[1]["reason"] == "LLVM ERROR: no such register" and "1 s" in rows[3]["reason"]
    assert sorted(row["id"] for row in seen) == sorted(row["id"] for row in rows)


def test_child_that_cannot_start_reports_why(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text("import no_such_module")
    with job_process.JobProcess([sys.executable, path], {}) as child:
        answer = child.run({}, 5)
    assert answer["status"] == "crashed" and "no_such_module" in answer["reason"]


def test_every_event_restarts_the_time_limit(worker):
    events = []
    with job_process.JobProcess([sys.executable, worker], {}) as child:
        assert child.run({"name": "slow"}, 1.5, events.append) == {"status": "compiled"}
    assert [event.get("at") for event in events] == [None, 0, 1, 2, 3]


def test_job_survives_json():
    assert CompileJob(**json.loads(json.dumps(dataclasses.asdict(KERNEL)))) == KERNEL


def check(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/compile_check.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_unknown_target_error_lists_known_targets():
    done = check("--targets=v99")
    assert done.returncode != 0 and "v99" in done.stdout + done.stderr
    assert "tpu7x" in done.stdout + done.stderr


def test_kernel_compiles_for_an_absent_chip(tmp_path):
    wheels = {"libtpu": "libtpu", "jax_plugins.xla_cuda12": "jax-cuda12-plugin"}
    wheels |= {"triton": "triton", "jax_triton": "jax-triton"}
    missing = [wheel for module, wheel in wheels.items() if not _is_installed(module)]
    if missing:
        reason = f"{', '.join(missing)} not installed here: `make compile-check` runs this"
        print(reason)
        pytest.skip(reason)
    out = tmp_path / "out.json"
    done = check("--targets=v5e", "--kernels=paged_attention", "--presets=none", f"--json={out}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(out.read_text("utf-8"))
    assert found["passed"] and all(row["status"] == "compiled" for row in found["rows"])


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
