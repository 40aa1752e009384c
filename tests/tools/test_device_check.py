"""The device check without a device: its arithmetic, its order, its watchdog, and a rehearsal."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cli.commands import COMMANDS
from jaxinfer.kernels.dispatch import dispatch
from tests.support.paths import ROOT
from tests.support.triton_bench import needs_triton

# Scripts are run, not installed; they find each other by their folder.
kernel_cases: Any = importlib.import_module("jaxinfer.tools.kernel_cases")
conformance: Any = importlib.import_module("jaxinfer.tools.device_check.conformance")
engine: Any = importlib.import_module("jaxinfer.tools.device_check.engine")
plan: Any = importlib.import_module("jaxinfer.tools.device_check.plan")
setting: Any = importlib.import_module("jaxinfer.tools.device_check.setting")
table: Any = importlib.import_module("jaxinfer.tools.device_check.table")
timing: Any = importlib.import_module("jaxinfer.tools.device_check.timing")
worker: Any = importlib.import_module("jaxinfer.tools.device_check.worker")


# -- timing


def counted(counts: list[int]) -> Any:
    def count(x):
        counts.append(1)
        return x

    return lambda x: jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_each_call_of_a_program_runs_once_and_the_fewest_are_subtracted():
    counts: list[int] = []
    tick = counted(counts)
    times = iter([0.0, 1.0, 2.0, 11.0])  # 1 s for the fewest, 9 s for 4 more
    taken = timing.device_seconds(
        lambda arguments, arrays: tick(arguments[0]) + arrays["y"],
        (jnp.ones(4),),
        {"y": jnp.ones(4)},
        4,
        repeats=0,
        clock=lambda: next(times),
    )
    assert taken == 2.0
    assert len(counts) == timing.FEWEST + (timing.FEWEST + 4)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda a, _: a[0] * 2, 2.0**5),  # the result takes x's place
        (lambda a, _: (a[0] * 2)[:1], 2.0**5),  # only its first number does
    ],
)
def test_a_call_takes_something_from_the_one_before(call, expected):
    program = timing._program(call, (jnp.ones(4),), {}, 5)
    assert float(jax.jit(program)((jnp.ones(4),), {})[0]) == expected


def test_results_take_the_places_of_activations_and_pages_but_not_of_lengths():
    spec = jax.ShapeDtypeStruct
    q, pages, lengths = spec((4, 8), "float32"), spec((2, 3), "int8"), spec((4,), "int32")
    assert timing.pairs((lengths, q, pages), (q, q, pages, lengths)) == [(1, 0), (2, 2)]


def test_the_number_of_calls_follows_from_the_least_time():
    assert timing.count_for(1e-3) == 30
    assert timing.count_for(1.0) == 3 and timing.count_for(0.0) == timing.MAX_CALLS


# -- agreement


def test_an_error_is_relative_and_nothing_passes_that_is_not_finite():
    ref = jnp.ones(100)
    assert conformance.relative_error(ref * 1.01, ref, ()) == pytest.approx(0.01, rel=1e-3)
    assert conformance.relative_error(ref, ref, ()) == 0
    for bad in (jnp.nan, jnp.inf):
        assert conformance.relative_error(ref.at[3].set(bad), ref, ()) == float("inf")


def test_of_pages_brought_up_to_date_the_change_counts():
    pages = jnp.full((1000, 8), 3.0).at[999].set(jnp.nan)  # a page that nobody owns
    ref, wrong = pages.at[0].set(1.0), pages  # nothing was written
    assert conformance.relative_error(ref, ref, (pages,)) == 0
    assert conformance.relative_error(wrong, ref, (pages,)) == pytest.approx(1.0)


def test_another_shape_or_type_is_no_small_error():
    with pytest.raises(
        ValueError, match=r"the result is float32\(2,\), the reference's int8\(2,\)"
    ):
        conformance.relative_error(jnp.ones(2), jnp.ones(2, jnp.int8), ())


def declines(x):
    raise NotImplementedError("out of memory")


DOUBLE_BACKENDS = {"reference": declines, "xla": lambda x: x * 2}


def double(x, *, backend=None):
    return dispatch("double", DOUBLE_BACKENDS, backend, x)


def make_ones(rng):
    return (np.ones(4, np.float32),), {}


def toy_case(**changes: Any) -> Any:
    spec = jax.ShapeDtypeStruct((4,), jnp.float32)
    values = {"function": double, "arguments": (spec,), "options": {}, "make": make_ones}
    return kernel_cases.Case(**values, bytes_moved=32, flops=4, tolerance=1e-5, **changes)


def test_where_the_reference_cannot_be_computed_plain_jax_says_so(monkeypatch):
    found, name = conformance.reference_of(toy_case(), (jnp.ones(4),), {})
    assert name == "xla" and (np.asarray(found) == 2).all()
    monkeypatch.setitem(DOUBLE_BACKENDS, "xla", declines)
    with pytest.raises(RuntimeError, match=r"no reference could be computed: reference: .*xla: "):
        conformance.reference_of(toy_case(), (jnp.ones(4),), {})


# -- order and time


class Child:
    """Answers by kind of job."""

    def __init__(self, **answers: Any):
        self.answers = answers
        self.asked: list[Any] = []

    def run(self, job, seconds, *, within):
        assert seconds <= within
        self.asked.append((job["kind"], job.get("case"), seconds))
        answer = self.answers[job["kind"]]
        return {"status": "measured", **answer} if "status" not in answer else dict(answer)


def time_budget(seconds: float = 1000.0) -> Any:
    return plan.TimeBudget(seconds, now=lambda: 0.0)


def rows_of(**cases: Any) -> list[dict[str, Any]]:
    return plan.kernel_rows({"op": cases}, "gpu")


def test_every_operator_is_looked_at_before_any_case_comes_second():
    cases = {"a": {"1": toy_case(), "2": toy_case()}, "b": {"3": toy_case(backends=("tpu", "gpu"))}}
    assert [row["name"] for row in plan.kernel_rows(cases, "gpu")] == [
        "a/gpu 1", "b/gpu 3", "a/gpu 2",
    ]  # fmt: skip
    assert plan.kernel_rows({}, "gpu") == []


def test_headlines_of_every_operator_are_looked_at_before_the_rest():
    top = toy_case(is_headline=True)
    cases = {"a": {"1": toy_case(), "2": top}, "b": {"3": top, "4": top}, "c": {"5": toy_case()}}
    rows = plan.kernel_rows(cases, "gpu")
    assert [row["case"] for row in rows] == ["3", "2", "4", "1", "5"]


@pytest.mark.parametrize("is_headline", [True, False])
def test_only_a_headline_that_the_time_was_too_short_for_is_a_failure(is_headline):
    done = {"kind": "kernel", "status": "measured", "agrees": True, "is_headline": True}
    late = {"kind": "kernel", "status": "not run", "is_headline": is_headline}
    assert table.has_passed([done, late]) != is_headline
    assert not table.has_passed([late])


def test_what_disagrees_is_not_timed():
    child = Child(check={"error": 0.5, "agrees": False}, measure={"seconds": 1.0, "calls": 3})
    rows = rows_of(one=toy_case())
    plan.check_kernels(child, time_budget(), rows, False, 0.0)
    assert [kind for kind, *_ in child.asked] == ["check"]
    assert not table.has_passed(rows) and "allowed 1e-05" in table.render(rows, {})


def test_what_agrees_is_timed_and_judged_by_what_the_device_gave():
    child = Child(check={"error": 1e-6, "agrees": True}, measure={"seconds": 2e-6, "calls": 3},
                  peer={"seconds": 3e-6, "how": "graph"})  # fmt: skip
    rows = rows_of(one=toy_case(peer=print), two=toy_case())
    plan.check_kernels(child, time_budget(), rows, False, 0.0)
    plan.check_peers(child, time_budget(), rows, False)
    ceilings = {"device": "GPU", "bandwidth": 32e6, "matrix_rate": 8e6}
    for row in rows:
        table.judge(row, ceilings)
    assert rows[0]["of_copy"] == pytest.approx(0.5) and rows[0]["of_matrix"] == pytest.approx(0.25)
    assert rows[0]["ratio"] == pytest.approx(1.5) and "ratio" not in rows[1]
    assert sum(kind == "peer" for kind, *_ in child.asked) == 1
    text = table.render(rows, ceilings)
    assert table.has_passed(rows) and "50 %" in text and "1.50" in text and "NOT" not in text


def test_a_case_that_hangs_or_is_declined_is_named_and_the_rest_goes_on():
    for answer in ({"status": "timed out", "reason": "it took over 60 s"},
                   {"status": "declined", "reason": "needs sm_90"}):  # fmt: skip
        rows = rows_of(one=toy_case(), two=toy_case())
        child = Child(check=answer)
        plan.check_kernels(child, time_budget(), rows, False, 0.0)
        assert len(child.asked) == 2 and not table.has_passed(rows)
        assert f"{answer['status']}: {answer['reason']}" in table.render(rows, {})


def test_a_time_that_cannot_be_told_from_none_is_no_figure():
    child = Child(check={"error": 0.0, "agrees": True}, measure={"seconds": 0.0, "calls": 3})
    rows = rows_of(one=toy_case())
    plan.check_kernels(child, time_budget(), rows, False, 0.0)
    assert not table.has_passed(rows) and "3 calls take no more time" in table.render(rows, {})


def test_a_missing_peer_is_told_and_fails_nothing():
    child = Child(check={"error": 0.0, "agrees": True}, measure={"seconds": 1.0, "calls": 3},
                  peer={"status": "declined", "reason": "PyTorch is not installed"})  # fmt: skip
    rows = rows_of(one=toy_case(peer=print))
    plan.check_kernels(child, time_budget(), rows, False, 0.0)
    plan.check_peers(child, time_budget(), rows, False)
    assert table.has_passed(rows) and "PyTorch is not installed" in table.render(rows, {})


def test_past_its_time_nothing_is_begun_and_what_is_reserved_is_kept():
    child = Child(check={"error": 0.0, "agrees": True}, measure={"seconds": 1.0, "calls": 3})
    rows = rows_of(one=toy_case())
    plan.check_kernels(child, time_budget(100), rows, False, 99.5)
    assert not child.asked and rows[0]["status"] == "not run"
    plan.check_kernels(child, time_budget(100), rows, False, 90)
    assert child.asked == [("check", "one", 10), ("measure", "one", 10)]


def test_a_child_that_does_not_start_takes_no_more_than_is_left():
    job_process = importlib.import_module("jaxinfer.tools.job_process")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with job_process.JobProcess(command, {}) as child:
        answer = plan.TimeBudget(1.5).run(child, {"kind": "check"}, 40)
    assert answer["status"] == "timed out" and answer["reason"].startswith("it took over 1.")


def test_headline_cases_come_first_and_the_number_stays_a_limit():
    cases = {"a": toy_case(), "b": toy_case(is_headline=True), "c": toy_case()}
    assert list(plan.headlines_first(cases, "gpu")) == ["b", "a", "c"]
    assert list(plan.headlines_first({"t": toy_case(backends=("tpu",)), **cases}, "gpu", 2)) == [
        "b",
        "a",
    ]


@pytest.mark.parametrize("operator", kernel_cases.operators())
def test_every_operator_has_headline_cases_for_a_gpu(operator):
    cases = kernel_cases.load(operator)
    assert any(case.is_headline and "gpu" in case.backends for case in cases.values())


def test_nothing_measured_is_no_success():
    assert not table.has_passed([])


def test_the_engines_figures_are_shares_of_their_floors():
    decode = {"kind": "decode", "name": "32 rows", "status": "measured", "floor_bytes": 1e9,
              "step_seconds": 2e-3, "device_step_seconds": 1.9e-3, "gap_seconds": 1e-4,
              "is_host_bound": False,
              "host_seconds": 5e-4, "tokens_per_second": 16000.0}  # fmt: skip
    first = {"kind": "first_token", "name": "8192", "status": "measured", "floor_flops": 1e12,
             "seconds": 0.004, "chunk": 2048}  # fmt: skip
    for row in (decode, first):
        table.judge(row, {"bandwidth": 1e12, "matrix_rate": 1e15})
    assert decode["of_floor"] == pytest.approx(0.5) and first["of_floor"] == pytest.approx(0.25)
    text = table.render([decode, first], {})
    assert "16,000 tokens/s" in text and "gap 100 us" in text and "4.0 ms" in text
    bound = table.render([decode | {"is_host_bound": True, "gap_seconds": -1e-6}], {})
    assert "host-bound" in bound and "gap" not in bound


def test_the_step_is_compared_with_and_without_xlas_options_where_there_is_time():
    answer = {"with_seconds": 8e-3, "without_seconds": 9e-3, "options": {"split": 1}}
    child = Child(decode={}, first_token={}, options=answer)
    *_, row = plan.check_engine(child, time_budget(), False, 0.0)
    text = table.render([row], {})
    assert "8.00 ms with" in text and "9.00 ms without" in text and "split=1" in text
    *others, row = plan.check_engine(child, time_budget(plan.ENGINE_SECONDS - 1), False, 0.0)
    assert row["status"] == "not run" and table.has_passed([*others, row])


# -- the child


def test_a_jobs_error_is_its_answer(monkeypatch):
    def broken(job):
        raise ValueError("first line\nsecond")

    monkeypatch.setattr(
        importlib.import_module("jaxinfer.tools.device_check.kernels"), "check", broken
    )
    answer = worker.handle({"kind": "check"}, print)
    assert (answer["status"], answer["reason"]) == ("failed", "ValueError: first line")
    assert worker.handle({"kind": "device", "rehearse": False}, print)["status"] == "declined"


def test_of_an_error_that_holds_a_traceback_the_end_is_told():
    error = RuntimeError("INTERNAL: Traceback (most recent call last):\n  File x\nKeyError: 'a'\n")
    assert worker.reason_of(error) == "RuntimeError: KeyError: 'a'"


def test_the_floors_of_llama_3_8b_are_those_of_its_shape():
    named = engine.model_from_table(engine.MODEL, engine.load_matrix()["models"][engine.MODEL])
    numerics = engine.numerics_for(engine.EngineConfig(dtype="bfloat16"))
    bench = engine.EngineBench(
        engine.FunctionalModel(named.family, named.config, numerics), (), False
    )
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    weights = 32 * layer + 4096 * 128256 + 4096
    assert engine._read_once(bench) == 2 * weights
    assert engine._token_bytes(bench) == 2 * 32 * 8 * 128 * 2


def test_jaxinfer_is_found_where_it_is_not_installed(tmp_path):
    folder = setting.source_links(tmp_path)
    code = "import jaxinfer.kernels.dispatch as d, sys; print(d.__file__)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == str(folder / "jaxinfer" / "kernels" / "dispatch.py"), done.stderr


# -- the whole of it


def check(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/device_check.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_without_a_gpu_the_check_says_so_and_fails(tmp_path):
    out = tmp_path / "out.json"
    done = check(f"--json={out}")
    assert done.returncode == 1 and "no GPU or TPU" in done.stdout
    assert not json.loads(out.read_text("utf-8"))["passed"]


def test_an_unknown_operator_is_answered_with_the_known_ones():
    done = check("--operators=nobody")
    assert done.returncode != 0 and "paged_attention" in done.stdout + done.stderr


@needs_triton
@pytest.mark.ci
@pytest.mark.once
def test_it_rehearses_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    done = check("--rehearse", "--operators=paged_attention", f"--json={out}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(out.read_text("utf-8"))
    assert found["passed"] and found["rehearsal"]
    kinds = [row["kind"] for row in found["rows"]]
    assert kinds.count("kernel") >= 2 and kinds.count("decode") == 1
    assert any("peer_seconds" in row for row in found["rows"])
    assert "a rehearsal: sizes and times mean nothing" in done.stdout
    assert " %" not in done.stdout, "a share of what a CPU gives"


def test_documented_commands_have_the_options_they_use():
    text = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    pattern = r"^ +(?:make|jaxinfer) (compile-check|tune|doctor)\b(.*)$"
    commands = re.findall(pattern, text, re.M)
    assert {name for name, _ in commands} == {"compile-check", "doctor", "tune"}
    for name, rest in commands:
        path = ROOT / f"{COMMANDS[name].module.replace('.', '/')}.py"
        source = path.read_text("utf-8")
        for option in re.findall(r"--(\w+)", rest):
            assert f'"{option}"' in source or f'"{option.removeprefix("no")}"' in source, option
