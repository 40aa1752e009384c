"""The compile gate: what it reads from compilers' texts, its data, its verdicts, its children.

The compilers themselves are not needed, but for the last test.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import load_config, preset_names
from jaxinfer.kernels import paged_attention

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

# Scripts are run, not installed; they find each other by their folder.
matrix_module: Any = importlib.import_module("compile_matrix")
report_module: Any = importlib.import_module("compile_report")
compile_run: Any = importlib.import_module("compile_run")
text_module: Any = importlib.import_module("compile_text")
Job, load_matrix, jobs_for = (
    matrix_module.Job,
    matrix_module.load_matrix,
    matrix_module.jobs_for,
)
Launches, parse = text_module.Launches, text_module.parse

MODULE = """HloModule jit_step, is_scheduled=true

%fused_add (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  ROOT %add.1 = f32[8]{0} add(%p0, %p1)
}

%turn (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %next = s32[] add(%i, %i)
  %f.1 = f32[8]{0} fusion(%x, %x), kind=kLoop, calls=%fused_add
  %copied = f32[8]{0} copy(%f.1)
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %copied)
}

%more (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] fusion(%state.1), kind=kLoop, calls=%fused_less
}

%short (p.2: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8]{0} parameter(0)
}

%long (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %sorted = f32[8]{0} sort(%p.3), dimensions={0}
}

ENTRY %main (a: f32[8], c: pred[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %c = pred[] parameter(1)
  %zero = s32[] constant(0)
  %scalar = s32[] add(%zero, %zero)
  %view = f32[4,2]{1,0} bitcast(%a)
  %f.2 = f32[8]{0} fusion(%a, %a), kind=kLoop, calls=%fused_add, metadata={op_name="jit(s)/block_1/add"}
  %init = (s32[], f32[8]{0}) tuple(%zero, %f.2)
  %w = (s32[], f32[8]{0}, /*index=2*/f32[]) while(%init), condition=%more, body=%turn LOOP
  %sum = f32[8]{0} all-reduce(%f.2), replica_groups={{0,1}}, to_apply=%fused_add
  %gs = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%view), dimensions={0}
  %gd = bf16[8]{0} all-gather-done(%gs)
  %alloc = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
  %k = f32[8]{0} custom-call(%sum), custom_call_target="tpu_custom_call", backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"},{"memory_space":"2","offset":"0","size":"7"}]}
  ROOT %r = f32[8]{0} conditional(%c, %a, %k), true_computation=%short, false_computation=%long
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("loop", "expected"),
    # Straight: f.2, all-reduce, all-gather, the kernel, and the longer branch's sort. A turn of the
    # loop: a fusion, a copy, and the fusion of its condition; scalars and views are free.
    [("", Launches(5, 1, 3)), (', backend_config={"known_trip_count":{"n":"4"}}', Launches(17))],
)
def test_launches_are_counted_with_loops_apart_unless_their_length_is_known(loop, expected):
    assert text_module.launches(parse(MODULE.replace(" LOOP", loop))) == expected


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("%f (p: f32[]) -> f32[] {\n}\n")


def test_collectives_are_summed_by_kind_and_an_asynchronous_one_counts_its_result():
    assert text_module.collectives(parse(MODULE)) == {
        "all-reduce": {"count": 1, "bytes": 32},
        "all-gather": {"count": 1, "bytes": 16},
    }


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("f32[2,3]{1,0}", [24]), ("(bf16[4], s32[])", [8, 4]), ("pred[9]", [9]), ("s4[3]", [2]),
     ("f8e4m3fn[5]", [5]), ("token[]", [0]), ("f32[0,7]", [0])],
)  # fmt: skip
def test_bytes_of_a_type_are_those_of_its_arrays(text, sizes):
    assert text_module.array_bytes(text) == sizes


def test_vmem_is_what_the_compiler_notes_beside_a_mosaic_kernel():
    assert text_module.mosaic_vmem(parse(MODULE)) == [4096]


def test_a_layers_kernels_are_those_that_carry_its_name():
    [kernel] = text_module.layer_kernels(parse(MODULE), 1)
    assert kernel == {"name": "f.2", "result": "f32[8]", "op": "add", "inside": {"add": 1}}
    assert not text_module.layer_kernels(parse(MODULE), 0)


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_registers_shared_memory_and_spills_are_read_kernel_by_kernel():
    assert text_module.ptxas_resources(PTXAS) == [
        text_module.Resources("decode", 168, 1024, 64),
        text_module.Resources("merge", 32, 0, 0),
    ]


def test_spills_are_found_among_xlas_warnings():
    log = (
        "W0101 asm.cc:1] Registers are spilled to local memory in function 'gemm_fusion_dot_3', "
        "8 bytes spill stores, 12 bytes spill loads\nW sort_rewriter.cc] something else\n"
    )
    assert text_module.xla_spills(log) == {"gemm_fusion_dot_3": 20}
    assert text_module.xla_spills("0 bytes spill stores in function 'x'") == {}


def test_a_reason_is_the_first_line_that_says_something():
    assert text_module.first_reason(ValueError("\n  out of memory\nstack...")) == "out of memory"
    assert text_module.first_reason(KeyError()) == "KeyError"
    assert len(text_module.first_reason("x" * 900)) == 300


def test_every_target_says_where_its_values_come_from_and_fits_its_platform():
    assert set(matrix_module.target_names()) == {
        "v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100",
    }  # fmt: skip
    for name in matrix_module.target_names():
        target = matrix_module.load_target(name)
        text = (matrix_module.TARGETS / f"{name}.toml").read_text("utf-8")
        assert text.startswith("# ") and "memory" in text.partition("platform")[0].lower()
        assert 2**33 < target.limit_bytes <= target.memory_bytes < 2**38
        assert target.platform in ("tpu", "gpu")
        is_gpu = target.platform == "gpu"
        assert is_gpu == (target.compute_capability is not None)
        if is_gpu:
            assert f"device_memory_size: {target.memory_bytes}\n" in (target.target_config or "")


def test_the_matrix_covers_every_backend_and_every_preset_for_an_accelerator():
    matrix = load_matrix()
    on_devices = set(paged_attention.BACKENDS) - {"reference"}
    assert set(matrix["operators"]["paged_attention"]) == on_devices
    assert set(matrix["presets"]) == set(preset_names()) - {"demo"}
    for name in matrix["presets"]:
        assert load_config(name).dtype != "auto", "a type that does not depend on who compiles"


def test_a_matrix_that_names_what_is_not_there_is_refused_as_a_whole(tmp_path):
    path = tmp_path / "matrix.toml"
    path.write_text(
        "[models]\n[layouts]\n[batches]\n"
        '[presets.p]\nmodel = "nobody"\ntargets = ["h100", "h900"]\n'
        '[operators.o.xla]\ntargets = []\n'
        'cases = [{layouts = ["flat"], page_sizes = [16], batches = ["none"]}]\n'
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'nobody'.*'h900'.*'flat'.*'none'"):
        load_matrix(path)


def test_jobs_are_the_product_of_the_cases_each_once_and_steps_come_first():
    matrix = tomllib.loads("""
        [presets.p]
        model = "m"
        targets = ["h100"]
        [operators.o.xla]
        targets = ["h100", "v5e"]
        cases = [
            { layouts = ["a", "b"], page_sizes = [16, 64], batches = ["decode"] },
            { layouts = ["a"], page_sizes = [16], batches = ["decode", "mixed"] },
            { layouts = ["a"], page_sizes = [16], batches = ["mixed"], folded = true },
        ]
    """)
    ids = [job.id for job in jobs_for(matrix, ["h100", "v4"], ["o"], ["p"])]
    assert ids == [
        "h100 p",
        "h100 o/xla a page=16 decode",
        "h100 o/xla a page=64 decode",
        "h100 o/xla b page=16 decode",
        "h100 o/xla b page=64 decode",
        "h100 o/xla a page=16 mixed",
        "h100 o/xla a page=16 folded mixed",
    ]


def test_a_choice_is_all_none_or_known_names():
    assert matrix_module.choose("targets", "all", ["a", "b"]) == ["a", "b"]
    assert matrix_module.choose("targets", "none", ["a", "b"]) == []
    assert matrix_module.choose("targets", "b, a", ["a", "b"]) == ["b", "a"]
    for wrong in ("c", "", "a,c"):
        with pytest.raises(ValueError, match="--targets="):
            matrix_module.choose("targets", wrong, ["a", "b"])


STEP = Job("h100", "step", "p", {"model": "m"})
KERNEL = Job("h100", "kernel", "o", {"backend": "gpu", "layout": "a", "page_size": 16,
             "batch": "decode", "folded": False})  # fmt: skip
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
    "collectives": {"all-reduce": {"count": 2, "bytes": 2**20}},
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


def test_what_keeps_to_its_budget_passes():
    text, has_passed = report_module.report([STEP, KERNEL], [STEP_ROW, KERNEL_ROW], BUDGETS)
    assert has_passed and "FAILED" not in text
    assert "128 registers, 64 KiB shared" in text and "3.00 of 4.00" in text
    assert "all-reduce 2 (1.0 MiB)" in text


@pytest.mark.parametrize(
    ("job", "row", "change", "reason"),
    [
        (STEP, STEP_ROW, {"per_layer": {"launches": 9.0, "loops": 0.0, "launches_in_loops": 0.0}},
         "launches a layer: 9, recorded 8"),
        (STEP, STEP_ROW, {"per_layer": {"launches": 8.0, "loops": 1.0, "launches_in_loops": 0.0}},
         "loops a layer: 1, recorded 0"),
        (STEP, STEP_ROW, {"memory": STEP_ROW["memory"] | {"fits": False, "total": 5 * 2**30}},
         "takes 5.00 of 4.00 GiB"),
        (STEP, STEP_ROW, {"id": "v4 p"}, "no recorded launches"),
        (KERNEL, KERNEL_ROW, {"spills": 64}, "spills 64 bytes"),
        (KERNEL, KERNEL_ROW, {"status": "refused", "reason": "Mosaic says no"}, "Mosaic says no"),
        (KERNEL, KERNEL_ROW, {"status": "declined", "reason": "head dim"}, "declined: head dim"),
        (STEP, STEP_ROW, {"status": "timed out", "reason": "300 s"}, "timed out: 300 s"),
    ],
)  # fmt: skip
def test_what_fails_is_named_with_its_reason(job, row, change, reason):
    text, has_passed = report_module.report([job], [row | change], BUDGETS)
    assert not has_passed and reason in text.partition("FAILED")[2]


def test_recording_replaces_what_ran_and_keeps_the_rest(tmp_path):
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
    jobs = jobs_for(matrix, matrix_module.target_names(), [], list(matrix["presets"]))
    assert set(report_module.load_budgets()) == {job.id for job in jobs}


WORKER = """
import json, os, sys, time
jobs = json.load(open(sys.argv[1]))
with open(sys.argv[2], "a", buffering=1) as out:
    for job in jobs:
        name = f"{job['target']} {job['name']}"
        out.write(json.dumps({"compiling": name}) + "\\n")
        if job["name"] == "crash":
            print("LLVM ERROR: no such register", file=sys.stderr, flush=True)
            os._exit(134)
        if job["name"] == "hang":
            time.sleep(60)
        out.write(json.dumps({"id": name, "status": "compiled"}) + "\\n")
"""


def test_a_compiler_that_crashes_or_hangs_costs_its_own_row(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(matrix_module, "STEP_SECONDS", 1)
    names = ["fine", "crash", "again", "hang", "last"]
    jobs = [Job(target, "step", name, {}) for target in ("h100", "v5e") for name in names]
    seen = []
    rows = compile_run.run_jobs(jobs, seen.append, worker)
    assert [row["id"] for row in rows] == [job.id for job in jobs]
    assert [row["status"] for row in rows[:5]] == [
        "compiled", "crashed", "compiled", "timed out", "compiled",
    ]  # fmt: skip
    assert rows[1]["reason"] == "LLVM ERROR: no such register" and "1 s" in rows[3]["reason"]
    assert sorted(row["id"] for row in seen) == sorted(row["id"] for row in rows)


def test_a_job_survives_the_way_to_its_child():
    assert Job(**json.loads(json.dumps(dataclasses.asdict(KERNEL)))) == KERNEL


def check(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/compile_check.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_an_unknown_target_is_answered_with_the_known_ones():
    done = check("--targets=v99")
    assert done.returncode != 0 and "v99" in done.stdout + done.stderr
    assert "tpu7x" in done.stdout + done.stderr


def test_a_kernel_compiles_for_a_chip_that_is_not_here(tmp_path):
    wheels = {"libtpu": "libtpu", "jax_plugins.xla_cuda12": "jax-cuda12-plugin"}
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
