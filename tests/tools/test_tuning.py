"""Tilings: tuning files, the model that ranks tilings, the search."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels import tuning
from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.triton_launch import TritonLaunch
from jaxinfer.tools import kernel_cases
from jaxinfer.tools.compile_gate.matrix import load_target
from jaxinfer.tools.compile_gate.text import KernelResources
from jaxinfer.tools.device_check import worker
from jaxinfer.tools.tuner import files, model, search
from tests.support.paths import ROOT
from tests.support.triton_bench import needs_triton


@dataclasses.dataclass(frozen=True)
class Tiling:
    block: int
    num_warps: int = 4

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"block {self.block} must be 1 or more")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H200")
    tuning.load.cache_clear()
    yield tmp_path
    tuning.load.cache_clear()


def write(folder: Path, fields: dict[str, Any]) -> None:
    text = json.dumps({"op/gpu": {"D=8": fields}})
    (folder / "nvidia_h200.json").write_text(text)


def test_tuned_fields_replace_the_heuristic(folder):
    write(folder, {"block": 64})
    assert tuning.tuned(Tiling(16, 8), "op/gpu", "D=8") == Tiling(64, 8)


@pytest.mark.parametrize(("operator", "key"), [("op/gpu", "D=9"), ("op/tpu", "D=8")])
def test_heuristic_decides_without_a_tuned_entry(folder, operator, key):
    write(folder, {"block": 64})
    assert tuning.tuned(Tiling(16), operator, key) == Tiling(16)


def test_another_devices_file_is_not_read(folder, monkeypatch):
    write(folder, {"block": 64})
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    assert tuning.tuned(Tiling(16), "op/gpu", "D=8") == Tiling(16)


@pytest.mark.parametrize("fields", [{"split": 2}, {"block": 0}])
def test_outdated_tuning_file_is_refused(folder, fields):
    write(folder, fields)
    with pytest.raises(ValueError, match=r"nvidia_h200.json, op/gpu, 'D=8'.*tune again"):
        tuning.tuned(Tiling(16), "op/gpu", "D=8")


def test_invalid_tuning_file_is_refused(folder):
    path = folder / "nvidia_h200.json"
    for text in ("{", "[]", '{"op/gpu": 3}', '{"op/gpu": {"D=8": 3}}'):
        path.write_text(text)
        tuning.load.cache_clear()
        with pytest.raises(ValueError, match=r"nvidia_h200.json"):
            tuning.tuned(Tiling(16), "op/gpu", "D=8")


def test_shipped_tuning_files_match_backends():
    for path in (ROOT / "kernels" / "tuned").glob("*.json"):
        for name, entries in tuning.load(path).items():
            operator, backend = name.split("/")
            module = importlib.import_module(f"jaxinfer.kernels.{operator}.{backend}")
            [tiling] = [x for member, x in vars(module).items() if member.endswith("Tiling")]
            for key, fields in entries.items():
                assert tiling(**fields), f"{path.name}: {name} {key}"


H100 = model.Gpu.from_target(load_target("h100"))


def launch(blocks: int, num_warps: int = 4, outputs: tuple[Any, ...] = ()) -> TritonLaunch:
    kernel = SimpleNamespace(arg_names=[f"out{i}" for i in range(len(outputs))], __name__="k")
    return TritonLaunch(kernel, (blocks,), (), outputs, num_warps=num_warps)


def seconds(blocks: int, registers: int = 64, shared: int = 32768, **changes: Any) -> float:
    resources = KernelResources("k", registers, shared, 0)
    work = {"bytes_moved": 10**9, "flops": 0} | changes
    return model.estimate(H100, [launch(blocks)], [resources], **work).seconds


def test_gpu_figures_match_the_datasheet():
    assert H100.multiprocessors == 132 and H100.shared_bytes == 228 * 1024
    assert H100.matrix_rate == pytest.approx(1.07e15, rel=0.01)  # 989e12 at the sustained clock
    assert model.Gpu.from_target(load_target("a100")).matrix_rate == pytest.approx(312e12, rel=0.01)


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "blocks"),
    [
        (32, 0, 4, 16),  # threads: 2,048 / 128, and registers just as many
        (128, 0, 4, 4),  # registers: 65,536 / (128 * 128)
        (129, 0, 4, 3),  # given out by 256 a warp
        (32, 100 * 1024, 4, 2),  # shared memory: 228 KiB
        (16, 0, 1, 32),  # blocks
        (255, 0, 16, 0),
    ],
)
def test_resident_blocks_follow_the_scarcest_resource(registers, shared, num_warps, blocks):
    resources = KernelResources("k", registers, shared, 0)
    assert model.resident_blocks(H100, resources, num_warps) == blocks


def test_partly_filled_waves_cost_more():
    full = seconds(132 * 6)
    assert full == pytest.approx(1e9 / H100.bandwidth, rel=0.05)
    assert seconds(132 * 6 + 1) > 1.5 * full
    assert seconds(33) > 3.5 * full


def test_too_few_bytes_in_flight_slow_the_memory():
    assert seconds(132, shared=1024) > 1.5 * seconds(132, shared=65536)


def test_compute_bound_estimate():
    assert seconds(792, flops=10**13) == pytest.approx(1e13 / H100.matrix_rate, rel=0.05)


def test_intermediate_results_count_twice():
    part = (jax.ShapeDtypeStruct((10**9 // 4,), jnp.float32),)
    resources = [KernelResources("k", 64, 32768, 0)] * 2
    both = [launch(792, outputs=part), launch(1, outputs=part)]
    found = model.estimate(H100, both, resources, bytes_moved=10**9, flops=0).seconds
    assert found == pytest.approx(3e9 / H100.bandwidth, rel=0.05)


def test_block_beyond_a_multiprocessor_is_refused():
    with pytest.raises(ValueError, match="cannot hold one of its blocks"):
        model.estimate(H100, [launch(1, 16)], [KernelResources("k", 255, 0, 0)], 1, 1)


def measured(key: str, **figures: float | None) -> dict[str, Any]:
    tried = [
        {"tiling": None if name == "today" else {"block": int(name[1:])}}
        | ({"reason": "no"} if value is None else {"seconds": value})
        for name, value in figures.items()
    ]
    return {"status": "measured", "operator": "op", "backend": "gpu", "key": key, "tried": tried}


def test_best_tiling_is_relative_to_the_current_one():
    # Of block 16 the long case gains, the short one loses more.
    rows = [
        measured("a", today=100.0, b16=80.0, b32=90.0),
        measured("a", today=1.0, b16=2, b32=0.9),
    ]
    assert files.best_tiling(rows) == {"tiling": {"block": 32}, "share": pytest.approx(0.9)}


@pytest.mark.parametrize(
    "rows",
    [
        [measured("a", today=1.0, b16=0.98)],
        [measured("a", today=1.0, b16=0.5), measured("a", today=1.0, b16=None)],
        [measured("a", today=None, b16=0.5)],
        [measured("a", today=1.0)],
    ],
    ids=["noise", "fails in one case", "nothing to compare with", "no other"],
)
def test_current_tiling_stays_unless_another_wins_everywhere(rows):
    assert files.best_tiling(rows) is None


def test_writing_keeps_other_keys(tmp_path):
    path = tmp_path / "tuned" / "gpu.json"
    first = {("op/gpu", "a"): {"tiling": {"block": 1}}}
    files.write_tilings(path, first | {("op/gpu", "b"): {"tiling": {"block": 2}}})
    files.write_tilings(path, {("op/gpu", "b"): {"tiling": {"block": 3}}})
    assert tuning.load(path) == {"op/gpu": {"a": {"block": 1}, "b": {"block": 3}}}


def twice(x, *, tiling: Tiling | None = None, launch: Any = None):
    """A backend: block 3 is wrong, block 5 does not compile."""
    block = 4 if tiling is None else tiling.block
    if block == 5:
        raise ValueError("no kernel of 5")
    return x * (2.5 if block == 3 else 2.0)


TWICE_BACKENDS = {"gpu": twice}


def front_door(x, *, backend: str | None = None):
    return dispatch("twice", TWICE_BACKENDS, backend, x)


def job(**changes: Any) -> dict[str, Any]:
    return {"kind": "tune", "operator": "twice", "case": "a", "backend": "gpu", "keep": 8,
            "rehearse": True, "target": None, **changes}  # fmt: skip


@pytest.fixture
def toy(monkeypatch):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    case = kernel_cases.Case(
        front_door, (x,), {}, lambda rng: ((np.ones(8, np.float32),), {}), 64, 8, 1e-5
    )
    module = SimpleNamespace(
        candidates=lambda x: [Tiling(b) for b in (3, 5, 7, 9)], tiling_key=lambda x: "D=8"
    )
    monkeypatch.setattr(search, "backend_module", lambda *names: module)
    monkeypatch.setattr(search.kernels, "case_of", lambda job: case)
    return module


def test_search_measures_agreeing_tilings_and_explains_others(toy, monkeypatch):
    taken = iter([4.0, 2.0, 3.0])
    monkeypatch.setattr(search, "device_seconds", lambda *a, **k: next(taken))
    found = search.tune(job())
    assert found["key"] == "D=8" and found["device"] == jax.devices()[0].device_kind
    by_block = {t["tiling"] and t["tiling"]["block"]: t for t in found["tried"]}
    assert {b: t.get("seconds") for b, t in by_block.items()} == {
        None: 4.0, 3: None, 5: None, 7: 2.0, 9: 3.0,
    }  # fmt: skip
    assert "differs from the current tiling's result" in by_block[3]["reason"]
    assert by_block[5]["reason"] == "no kernel of 5"
    rows = [job() | found | {"status": "measured"}]
    best = files.best_tiling(rows)
    assert best is not None and best["tiling"] == {"block": 7, "num_warps": 4}


def test_keep_limits_the_measured_tilings(toy, monkeypatch):
    monkeypatch.setattr(search, "device_seconds", lambda *a, **k: 1.0)
    assert len(search.tune(job(keep=1))["tried"]) == 2  # and today's


def test_ranking_without_a_device_drops_spills_and_refusals(toy, monkeypatch):
    def compile_launch(self, tiling):
        if tiling == 5:
            raise ValueError("out of shared memory")
        return [KernelResources("k", 64, 1024 * tiling, 8 if tiling == 9 else 0)]

    def record(case, backend, tiling=None):
        return [4 if tiling is None else tiling.block]

    compiler = SimpleNamespace(compile=lambda launch: compile_launch(None, launch))
    monkeypatch.setattr(search, "_triton", lambda name: compiler)
    monkeypatch.setattr(search, "record_launches", record)
    monkeypatch.setattr(
        search,
        "estimate",
        lambda gpu, launches, resources, *work: model.Estimate(1 / launches[0], 1, 1, 64, 0),
    )
    found = search.tune(job(target="h100", rehearse=False))
    assert found["device"] == "NVIDIA H100 80GB HBM3"
    order = [t["tiling"] and t["tiling"]["block"] for t in found["tried"]]
    assert order == [7, None, 3, 5, 9]
    assert [t.get("reason") for t in found["tried"][3:]] == [
        "out of shared memory",
        "spills 8 bytes",
    ]


def test_backend_without_candidates_declines(toy):
    toy.tiling_key = lambda x, weight: "D=8"
    answer = worker.handle(job(), print)
    assert answer["status"] == "failed" and "missing 1 required" in answer["reason"]
    toy.tiling_key = lambda x: x.pages
    assert worker.handle(job(), print)["status"] == "failed"
    del toy.candidates
    with pytest.raises(NotImplementedError, match="twice/gpu has no candidates"):
        search.tune(job())


def tune(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/tune_kernels.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--operators=nobody"], "nobody"),
        (["--target=v99"], "tpu7x"),
        (["--target=h100", "--rehearse"], "there is no chip to rehearse"),
        (["--rehearse", "--write"], "give --folder"),
        (["--keep=0"], "keep"),
    ],
)
def test_tuner_refuses_contradicting_flags(args, match):
    done = tune(*args)
    assert done.returncode != 0 and match in done.stdout + done.stderr


def test_tuner_without_device_and_target_fails():
    done = tune()
    assert done.returncode != 0 and "no GPU or TPU" in done.stderr + done.stdout


@needs_triton
@pytest.mark.ci
@pytest.mark.once
def test_the_tuner_rehearses_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    done = tune("--rehearse", "--operators=rope_and_write", "--keep=1", f"--json={out}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(out.read_text("utf-8"))
    assert all(row["status"] == "measured" and len(row["tried"]) == 2 for row in found["rows"])
    assert "keys;" in done.stdout and not list(tmp_path.glob("cpu*"))
