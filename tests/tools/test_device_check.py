"""The device check without a device: arithmetic, order, watchdog, and a rehearsal."""

from __future__ import annotations

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
from jaxinfer.tools import job_process, kernel_cases
from jaxinfer.tools.device_check import (
    conformance,
    engine,
    kernels,
    plan,
    table,
    timing,
    worker,
)
from tests.support.paths import ROOT
from tests.support.triton_bench import needs_triton

# -- timing


def counted(counts: list[int]) -> Any:
    def count(x):
        counts.append(1)
        return x

    return lambda x: jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_timing_subtracts_the_smallest_program():
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
def test_each_call_depends_on_the_previous_one(call, expected):
    program = timing._program(call, (jnp.ones(4),), {}, 5)
    assert float(jax.jit(program)((jnp.ones(4),), {})[0]) == expected


def test_results_replace_activations_and_pages_but_not_lengths():
    spec = jax.ShapeDtypeStruct
    q, pages, lengths = spec((4, 8), "float32"), spec((2, 3), "int8"), spec((4,), "int32")
    assert timing.pairs((lengths, q, pages), (q, q, pages, lengths)) == [(1, 0), (2, 2)]


def test_number_of_calls_follows_from_the_floor():
    assert timing.count_for(1e-3) == 30
    assert timing.count_for(1.0) == 3 and timing.count_for(0.0) == timing.MAX_CALLS


# -- agreement


def test_error_is_relative_and_infinite_for_nonfinite_results():
    ref = jnp.ones(100)
    assert conformance.relative_error(ref * 1.01, ref, ()) == pytest.approx(0.01, rel=1e-3)
    assert conformance.relative_error(ref, ref, ()) == 0
    for bad in (jnp.nan, jnp.inf):
        assert conformance.relative_error(ref.at[3].set(bad), ref, ()) == float("inf")


def test_error_of_updated_pages_is_relative_to_the_change():
    pages = jnp.full((1000, 8), 3.0).at[999].set(jnp.nan)  # a page that nobody owns
    ref, wrong = pages.at[0].set(1.0), pages  # nothing was written
    assert conformance.relative_error(ref, ref, (pages,)) == 0
    assert conformance.relative_error(wrong, ref, (pages,)) == pytest.approx(1.0)


def test_other_shape_or_type_is_refused():
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


def test_plain_jax_replaces_a_failing_reference(monkeypatch):
    found, name = conformance.reference_of(toy_case(), (jnp.ones(4),), {})
    assert name == "xla" and (np.asarray(found) == 2).all()
    monkeypatch.setitem(DOUBLE_BACKENDS, "xla", declines)
    with pytest.raises(RuntimeError, match=r"no reference could be computed: reference: .*xla: "):
        conformance.reference_of(toy_case(), (jnp.ones(4),), {})


# -- order and time


class Child:
    """A child process that answers by the kind of job."""

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


def test_every_operator_comes_before_any_second_case():
    cases = {"a": {"1": toy_case(), "2": toy_case()}, "b": {"3": toy_case(backends=("tpu", "gpu"))}}
    assert [row["name"] for row in plan.kernel_rows(cases, "gpu")] == [
        "a/gpu 1", "b/gpu 3", "a/gpu 2",
    ]  # fmt: skip
    assert plan.kernel_rows({}, "gpu") == []


def test_headlines_of_every_operator_come_first():
    top = toy_case(is_headline=True)
    cases = {"a": {"1": toy_case(), "2": top}, "b": {"3": top, "4": top}, "c": {"5": toy_case()}}
    rows = plan.kernel_rows(cases, "gpu")
    assert [row["case"] for row in rows] == ["3", "2", "4", "1", "5"]


@pytest.mark.parametrize("is_headline", [True, False])
def test_only_an_omitted_headline_is_a_failure(is_headline):
    done = {"kind": "kernel", "status": "measured", "agrees": True, "is_headline": True}
    late = {"kind": "kernel", "status": "not run", "is_headline": is_headline}
    assert table.has_passed([done, late]) != is_headline
    assert not table.has_passed([late])


def test_disagreeing_case_is_not_timed():
    child: Any = Child(check={"error": 0.5, "agrees": False}, measure={"seconds": 1.0, "calls": 3})
    rows = rows_of(one=toy_case())
    plan.check_kernels(child, time_budget(), rows, False, 0.0)
    assert [kind for kind, *_ in child.asked] == ["check"]
    assert not table.has_passed(rows) and "allowed 1e-05" in table.render(rows, {})


def test_agreeing_case_is_timed_relative_to_the_device():
    child: Any = Child(check={"error": 1e-6, "agrees": True}, measure={"seconds": 2e-6, "calls": 3},
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


def test_hanging_or_declined_case_is_named_and_the_rest_continues():
    for answer in ({"status": "timed out", "reason": "it took over 60 s"},
                   {"status": "declined", "reason": "needs sm_90"}):  # fmt: skip
        rows = rows_of(one=toy_case(), two=toy_case())
        child: Any = Child(check=answer)
        plan.check_kernels(child, time_budget(), rows, False, 0.0)
        assert len(child.asked) == 2 and not table.has_passed(rows)
        assert f"{answer['status']}: {answer['reason']}" in table.render(rows, {})


def test_time_of_zero_is_a_problem():
    child: Any = Child(check={"error": 0.0, "agrees": True}, measure={"seconds": 0.0, "calls": 3})
    rows = rows_of(one=toy_case())
    plan.check_kernels(child, time_budget(), rows, False, 0.0)
    assert not table.has_passed(rows) and "3 calls take no more time" in table.render(rows, {})


def test_missing_peer_is_reported_and_no_failure():
    child: Any = Child(check={"error": 0.0, "agrees": True}, measure={"seconds": 1.0, "calls": 3},
                  peer={"status": "declined", "reason": "PyTorch is not installed"})  # fmt: skip
    rows = rows_of(one=toy_case(peer=print))
    plan.check_kernels(child, time_budget(), rows, False, 0.0)
    plan.check_peers(child, time_budget(), rows, False)
    assert table.has_passed(rows) and "PyTorch is not installed" in table.render(rows, {})


def test_nothing_begins_after_the_time_and_reserves_are_kept():
    child: Any = Child(check={"error": 0.0, "agrees": True}, measure={"seconds": 1.0, "calls": 3})
    rows = rows_of(one=toy_case())
    plan.check_kernels(child, time_budget(100), rows, False, 99.5)
    assert not child.asked and rows[0]["status"] == "not run"
    plan.check_kernels(child, time_budget(100), rows, False, 90)
    assert child.asked == [("check", "one", 10), ("measure", "one", 10)]


def test_child_that_does_not_start_is_limited_to_the_time_left():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with job_process.JobProcess(command, {}) as child:
        answer = plan.TimeBudget(1.5).run(child, {"kind": "check"}, 40)
    assert answer["status"] == "timed out" and answer["reason"].startswith("it took over 1.")


def test_headlines_come_first_within_the_limit():
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


def test_empty_measurement_is_a_failure():
    assert not table.has_passed([])


def test_engine_figures_are_shares_of_floors():
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


def test_xla_options_are_compared_if_time_is_left():
    answer = {"with_seconds": 8e-3, "without_seconds": 9e-3, "options": {"split": 1}}
    child: Any = Child(decode={}, first_token={}, options=answer)
    *_, row = plan.check_engine(child, time_budget(), False, 0.0)
    text = table.render([row], {})
    assert "8.00 ms with" in text and "9.00 ms without" in text and "split=1" in text
    *others, row = plan.check_engine(child, time_budget(plan.ENGINE_SECONDS - 1), False, 0.0)
    assert row["status"] == "not run" and table.has_passed([*others, row])


# -- the child


def test_job_error_becomes_its_result(monkeypatch):
    def broken(job):
        raise ValueError("first line\nsecond")

    monkeypatch.setattr(kernels, "check", broken)
    answer = worker.handle({"kind": "check"}, print)
    assert (answer["status"], answer["reason"]) == ("failed", "ValueError: first line")
    assert worker.handle({"kind": "device", "rehearse": False}, print)["status"] == "declined"


def test_reason_of_a_traceback_is_its_last_line():
    error = RuntimeError("INTERNAL: Traceback (most recent call last):\n  File x\nKeyError: 'a'\n")
    assert worker.reason_of(error) == "RuntimeError: KeyError: 'a'"


def test_floors_of_llama_3_8b_follow_from_its_shape():
    named = engine.model_from_table(engine.MODEL, engine.load_matrix()["models"][engine.MODEL])
    numerics = engine.numerics_for(engine.EngineConfig(dtype="bfloat16"))
    bench = engine.EngineBench(
        engine.FunctionalModel(named.family, named.config, numerics), (), False
    )
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    weights = 32 * layer + 4096 * 128256 + 4096
    assert engine._read_once(bench) == 2 * weights
    assert engine._token_bytes(bench) == 2 * 32 * 8 * 128 * 2


# -- the whole of it


def check(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/device_check.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_check_without_a_gpu_fails_with_a_message(tmp_path):
    out = tmp_path / "out.json"
    done = check(f"--json={out}")
    assert done.returncode == 1 and "no GPU or TPU" in done.stdout
    assert not json.loads(out.read_text("utf-8"))["passed"]


def test_unknown_operator_error_lists_known_operators():
    done = check("--operators=nobody")
    assert done.returncode != 0 and "paged_attention" in done.stdout + done.stderr


@needs_triton
@pytest.mark.ci
@pytest.mark.once
def test_device_check_rehearses_on_a_cpu(tmp_path):
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
