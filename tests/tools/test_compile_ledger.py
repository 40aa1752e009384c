"""The compile gate's ledger: what is hashed, what counts as stale, what CI compiles again.

Rows are made up, and nothing is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.tools.compile_gate import sources
from jaxinfer.tools.compile_gate.gate import Gate, RunJobs
from jaxinfer.tools.compile_gate.inputs import Inputs
from jaxinfer.tools.compile_gate.ledger import Ledger, Row
from jaxinfer.tools.compile_gate.matrix import CompileJob, load_matrix
from jaxinfer.tools.compile_gate.sources import SourceTree, installed_modules

CODE = '''
"""A module."""
import a.helper

def f(x: "Float[A, 'n']") -> int:
    """Twice."""
    if x < 0:
        raise ValueError(f"{x} is negative")
    return 2 * x  # doubled
'''


def tree_of(folder: Path, **texts: str) -> SourceTree:
    modules = {}
    for name, text in texts.items():
        path = folder / f"{name}.py"
        path.write_text(text)
        modules["a" if name == "init" else f"a.{name}"] = path
    return SourceTree(modules)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Another\nwording."""'),
        ("  # doubled", ""),
        ('"""Twice."""', ""),
        ("is negative", "is below zero; give 0 or more"),
        ("import a.helper\n", "import a.helper\n\n\n"),
        (
            "import a.helper\n",
            "import a.helper\nif TYPE_CHECKING:\n    from a.other import Thing\n",
        ),
    ],
)
def test_rewording_keeps_the_hash(tmp_path, old, new):
    assert CODE.replace(old, new) != CODE
    before = tree_of(tmp_path, main=CODE, helper="", other="1").digest(["a.main"])
    after = tree_of(tmp_path, main=CODE.replace(old, new), helper="", other="1").digest(["a.main"])
    assert before == after


@pytest.mark.parametrize(
    ("old", "new"),
    [("2 * x", "3 * x"), ("x < 0", "x <= 0"), ("ValueError", "NotImplementedError")],
)
def test_a_change_of_code_changes_the_hash(tmp_path, old, new):
    before = tree_of(tmp_path, main=CODE, helper="").digest(["a.main"])
    assert tree_of(tmp_path, main=CODE.replace(old, new), helper="").digest(["a.main"]) != before


def test_the_hash_covers_what_is_imported_and_nothing_else(tmp_path):
    texts = {"main": CODE, "helper": "def g():\n    from a import deep", "deep": "1", "alone": "1"}
    before = tree_of(tmp_path, **texts)
    assert before.closure(["a.main"]) == {"a.main", "a.helper", "a.deep"}
    digest = before.digest(["a.main"])
    assert tree_of(tmp_path, **texts | {"alone": "2"}).digest(["a.main"]) == digest
    assert tree_of(tmp_path, **texts | {"deep": "2"}).digest(["a.main"]) != digest
    with pytest.raises(ValueError, match=r"no module a\.lost"):
        before.digest(["a.lost"])


def test_modules_that_the_hash_names_exist():
    modules = installed_modules()
    for name in (*sources.IGNORED, *sources.FOLLOWED):
        assert name in modules, f"{name}: renamed or gone"


KERNEL = CompileJob("h100", "kernel", "add_norm", {"backend": "gpu", "case": "decode"})
OTHER = CompileJob("v5e", "kernel", "add_norm", {"backend": "tpu", "case": "decode"})
STEP_VALUES = {"model": "llama3_8b", "is_whole": False}
STEP = CompileJob("h100", "step", "llama3_8b_h100", STEP_VALUES)
STRUCTURE = CompileJob("h100", "structure", "gpt2", {})
JOBS = [KERNEL, OTHER, STEP, STRUCTURE]
VERSIONS = {"jax": "1", "jaxlib": "1", "libtpu": "1", "triton": "1"}


def test_each_kind_of_job_depends_on_its_modules():
    tree = SourceTree(installed_modules())
    inputs = Inputs(load_matrix(), VERSIONS, tree)
    kernel, step, structure = (tree.closure(inputs.roots(job)) for job in (KERNEL, STEP, STRUCTURE))
    gpu = {"jaxinfer.kernels.add_norm.gpu_kernel", "jaxinfer.kernels.triton_launch"}
    assert kernel >= gpu | {"jaxinfer.tools.kernel_cases.add_norm"}
    assert not any(name.startswith("jaxinfer.kernels.paged_attention") for name in kernel)
    assert step >= gpu | {"jaxinfer.execution.step", "jaxinfer.models.decoder", "jaxinfer.config"}
    assert step >= {"jaxinfer.sharding.rules", "jaxinfer.kernels.paged_attention.tpu_kernel"}
    assert not any(name.startswith("jaxinfer.engine") for name in step)
    assert structure >= gpu | {"jaxinfer.models.gpt2"}


def test_inputs_are_hashed_with_data_and_compilers():
    tree, matrix = SourceTree(installed_modules()), load_matrix()
    before = Inputs(matrix, VERSIONS, tree).all(JOBS)
    assert len(set(before.values())) == len(JOBS)
    assert Inputs(matrix, VERSIONS, tree).all(JOBS) == before

    def changed(matrix: dict[str, Any], versions: dict[str, str]) -> list[str]:
        after = Inputs(matrix, versions, tree).all(JOBS)
        return [name for name in after if after[name] != before[name]]

    assert changed(matrix, VERSIONS | {"libtpu": "2"}) == [OTHER.id]
    assert changed(matrix, VERSIONS | {"triton": "2"}) == [KERNEL.id, STEP.id, STRUCTURE.id]
    gpt2 = matrix["structures"] | {"gpt2": matrix["structures"]["gpt2"] | {"n_embd": 8}}
    assert changed(matrix | {"structures": gpt2}, VERSIONS) == [STRUCTURE.id]
    models = matrix["models"] | {"llama3_8b": matrix["models"]["llama31_8b"]}
    assert changed(matrix | {"models": models}, VERSIONS) == [STEP.id]


def row_of(job: CompileJob, **changes: Any) -> Row:
    """A row that passes."""
    count = {"straight": 1, "loops": 0, "in_loops": 0}
    row: Row = {"id": job.id, "status": "compiled", "seconds": 1.0, "job_cpu_seconds": 2.0}
    row |= {"launches": count, "cpu_seconds": 1.0}
    if job.kind == "step":
        row |= {"per_layer": {"launches": 8.0}, "memory": {"fits": True}}
    return row | changes


class Compilers:
    """Gives rows for jobs, and remembers which it was asked for."""

    def __init__(self, changes: Callable[[CompileJob], dict[str, Any]] = lambda job: {}):
        self.asked: list[str] = []
        self.changes = changes

    def __call__(self, jobs: Sequence[CompileJob], on_row: Callable[[Row], None], end: float):
        self.asked += [job.id for job in jobs]
        rows = [row_of(job, **self.changes(job)) for job in jobs if time.monotonic() < end]
        for row in rows:
            on_row(row)
        return rows


INPUTS = {job.id: f"hash of {job.id}" for job in JOBS}
BUDGETS = {STEP.id: {"launches": 8}}


def ledger_of(jobs: Sequence[CompileJob]) -> Ledger:
    ledger = Ledger()
    for job in jobs:
        ledger.record(row_of(job), INPUTS[job.id], [])
    return ledger


def gate_of(ledger: Ledger, run: RunJobs, **changes: Any) -> Gate:
    return Gate(ledger, **{"inputs": INPUTS, "budgets": dict(BUDGETS), "run_jobs": run,
                           "save": lambda: None} | changes)  # fmt: skip


def test_the_ledger_survives_its_file_with_one_entry_a_line(tmp_path):
    path = tmp_path / "ledger.json"
    assert Ledger.load(path) == Ledger()
    ledger = ledger_of(JOBS)
    ledger.use_compilers("tpu", VERSIONS)
    ledger.record(row_of(OTHER), INPUTS[OTHER.id], [])
    ledger.save(path)
    assert Ledger.load(path) == ledger
    assert sum(job.id in line for line in path.read_text().splitlines() for job in JOBS) == 4
    assert '"cpu_seconds"' not in path.read_text()  # of no use to a later run


def test_a_full_run_records_what_passes_and_forgets_what_fails():
    spills = lambda job: {"spills": 64} if job == KERNEL else {}
    ledger, saved = ledger_of([KERNEL]), []
    gate = gate_of(ledger, run := Compilers(spills), save=lambda: saved.append(1))
    outcome = gate.compile_all(JOBS)
    assert run.asked == list(outcome.rows) == [job.id for job in JOBS]
    assert set(ledger.entries) == {OTHER.id, STEP.id, STRUCTURE.id}
    assert len(saved) == len(JOBS)  # an interrupted run keeps what it did
    assert ledger.stale(JOBS, INPUTS) == [KERNEL]


def test_recording_budgets_accepts_a_step_that_has_none():
    ledger = Ledger()
    gate_of(ledger, Compilers(), budgets={}).compile_all([STEP])
    assert not ledger.entries
    gate = gate_of(ledger, Compilers(), budgets={}, records_budgets=True)
    gate.compile_all([STEP])
    assert list(ledger.entries) == [STEP.id] and gate.budgets == {STEP.id: {"launches": 8.0}}


def test_a_changed_hash_makes_a_row_stale_and_the_changed_run_compiles_it_alone():
    ledger = ledger_of(JOBS)
    new_inputs = INPUTS | {STEP.id: "another hash"}
    run = Compilers()
    outcome = gate_of(ledger, run, inputs=new_inputs).compile_changed(JOBS)
    assert run.asked == [STEP.id]
    assert set(outcome.rows) == {job.id for job in JOBS}
    assert outcome.rows[KERNEL.id]["status"] == "compiled"
    assert ledger.stale(JOBS, new_inputs) == []


def test_ci_compiles_what_changed_and_a_sample_and_records_nothing():
    ledger = ledger_of([KERNEL, STEP, STRUCTURE])
    entries = dict(ledger.entries)
    run = Compilers()
    outcome = gate_of(ledger, run).check(JOBS, seed="abc", budget_s=60)
    assert run.asked[0] == OTHER.id and set(run.asked) == {job.id for job in JOBS}
    assert not outcome.failures and set(outcome.rows) == {job.id for job in JOBS}
    assert "1 changed rows compile; record them" in outcome.notes[0]
    assert "3 rows are recorded, 3 of them compiled again (--sample=abc)" in outcome.notes[1]
    assert ledger.entries == entries


def test_the_sample_is_chosen_by_the_seed_within_the_seconds():
    jobs = [
        CompileJob("v5e", "kernel", "o", {"backend": "tpu", "case": f"{i}"}) for i in range(100)
    ]
    ledger = Ledger()
    for i, job in enumerate(jobs):
        ledger.record(row_of(job, job_cpu_seconds=100.0 if i == 0 else 2.0), "", [])
    sample = ledger.sample(jobs, "a", seconds=20, longest=10)
    assert len(sample) == 10 and jobs[0] not in sample
    assert ledger.sample(jobs, "a", seconds=20, longest=10) == sample
    assert ledger.sample(jobs, "b", seconds=20, longest=10) != sample
    assert ledger.sample(jobs, "a", seconds=0, longest=10) == []


def test_ci_fails_at_once_when_too_much_changed():
    ledger = ledger_of([KERNEL])
    run = Compilers()
    outcome = gate_of(ledger, run).check(JOBS, seed="abc", budget_s=10)
    assert run.asked == []
    reason = outcome.failures["ledger.json"]
    assert "3 of 4 rows are missing or stale" in reason and "--budget_s is 10" in reason
    assert "make compile-check COMPILE_ARGS=--changed" in reason


def test_ci_fails_for_a_changed_row_that_was_not_compiled_in_time():
    ledger = ledger_of(JOBS)
    inputs = INPUTS | {KERNEL.id: "another hash"}
    never: RunJobs = lambda jobs, on_row, end: []
    outcome = gate_of(ledger, never, inputs=inputs).check(JOBS, seed="abc", budget_s=60)
    assert "1 of 1 missing or stale rows were not compiled" in outcome.failures["ledger.json"]
    assert set(outcome.rows) == {job.id for job in JOBS} - {KERNEL.id}


def test_ci_fails_for_a_row_that_comes_out_otherwise_than_recorded():
    more = lambda job: {"launches": {"straight": 2, "loops": 0, "in_loops": 0}}
    outcome = gate_of(ledger_of([KERNEL]), Compilers(more)).check([KERNEL], seed="abc", budget_s=60)
    assert "'straight': 2" in outcome.failures[KERNEL.id]
    assert "'straight': 1" in outcome.failures[KERNEL.id]


def test_recorded_rows_are_judged_by_the_budgets_of_today():
    from jaxinfer.tools.compile_gate.report import problems

    gate = gate_of(ledger_of([STEP]), Compilers(), budgets={STEP.id: {"launches": 7}})
    outcome = gate.compile_changed([STEP])
    assert problems(outcome.rows[STEP.id], gate.budgets) == ["launches a layer: 8, recorded 7"]


def test_other_compilers_drop_the_rows_of_their_platform():
    ledger = Ledger()
    for platform in ("tpu", "gpu"):
        ledger.use_compilers(platform, VERSIONS)
    for job in JOBS:
        ledger.record(row_of(job), INPUTS[job.id], [])
    ledger.use_compilers("tpu", VERSIONS)
    assert set(ledger.entries) == {job.id for job in JOBS}
    ledger.use_compilers("tpu", VERSIONS | {"libtpu": "2"})
    assert set(ledger.entries) == {KERNEL.id, STEP.id, STRUCTURE.id}
    ledger.keep_only([KERNEL])
    assert list(ledger.entries) == [KERNEL.id]
