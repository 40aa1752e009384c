"""The compile gate: every kernel and every preset's whole step, compiled for chips not at hand.

    make compile-check                               # everything, which takes 10 to 40 minutes
    make compile-check COMPILE_ARGS=--changed        # what changed since the ledger was written
    make compile-check-ci                            # as CI does: minutes
    jaxinfer compile-check --targets=v5e,h100 --kernels=all --presets=none --json=out.json

The real TPU and GPU compilers run, on a CPU, in an environment that has their packages (`make
compile-check` makes one). Nothing is allocated and nothing runs: the gate tells what a compiler
refuses, what does not fit, what spills and how many kernels a layer takes, not how long anything
takes. Kernels are those of `kernel_cases/`; steps, and the structures of other models (a small step
of a layer or two), those of `matrix.toml`; chips those of `targets/`. `budgets.json` holds the
launches a layer that a step may take. Exits with 1 if anything in its table failed: a compiler or a
backend that refuses, registers that spill, a step that does not fit or takes more launches a layer
than recorded, a module of cases that is broken.

`ledger.json` records each row that passed with a hash of what it depends on: sources, data,
compilers. `--ledger` trusts the rows whose hash is the same, and compiles what changed and a sample
of the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

# Before JAX is imported: the cases are abstract, and no device is looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags

from jaxinfer.tools import kernel_cases
from jaxinfer.tools.compile_gate.gate import Gate, OnRow, Outcome
from jaxinfer.tools.compile_gate.inputs import Inputs
from jaxinfer.tools.compile_gate.ledger import COMPILERS, Ledger, Row
from jaxinfer.tools.compile_gate.matrix import (
    CompileJob,
    choose,
    jobs_for,
    load_matrix,
    load_target,
    target_names,
)
from jaxinfer.tools.compile_gate.report import load_budgets, problems, record_budgets, report
from jaxinfer.tools.compile_gate.run import run_jobs

FLAGS = flags.FLAGS

TARGETS = flags.DEFINE_string(
    "targets", "all", "Chips: all, or names of jaxinfer/tools/targets/*.toml."
)
KERNELS = flags.DEFINE_string("kernels", "all", "Operators: all, none, or names.")
PRESETS = flags.DEFINE_string("presets", "all", "Presets with a step to compile: all, none, names.")
STRUCTURES = flags.DEFINE_string("structures", "all", "Structures of models: all, none, names.")
JSON = flags.DEFINE_string("json", None, "Also write everything that was found to this file.")
RECORD = flags.DEFINE_boolean(
    "record_budgets", False, "Make the launches a layer found now the budget of later runs."
)
CHANGED = flags.DEFINE_boolean(
    "changed", False, "Compile only what the ledger lacks or has with other sources or compilers."
)
CHECK_LEDGER = flags.DEFINE_boolean(
    "ledger",
    False,
    "Check the ledger: compile what changed and a sample of the rest, within --budget_s; write "
    "nothing.",
)
SAMPLE = flags.DEFINE_string(
    "sample", "", "With --ledger: decides which recorded rows are compiled again (a commit's hash)."
)
BUDGET_S = flags.DEFINE_float(
    "budget_s", 180, "With --ledger: seconds after which no compile begins."
)

REQUIRED = (
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc-cu12",
    "triton",
    "jax-triton",
)
PACKAGES = sorted({name for names in COMPILERS.values() for name in names})


def versions() -> dict[str, str]:
    """The versions of the compilers that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def missing_packages() -> list[str]:
    """The packages that the compilers need and that are not installed."""
    installed = {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()}
    return [name for name in REQUIRED if name not in installed]


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if sum((CHECK_LEDGER.value, CHANGED.value, RECORD.value)) > 1:
        raise app.UsageError("--ledger, --changed and --record_budgets are three ways to run: one")
    try:
        jobs, broken = _chosen_jobs()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    if missing := missing_packages():
        sys.exit(
            f"compile-check needs {', '.join(missing)}, which are not installed: run "
            "`make compile-check` in a clone, which installs them"
        )
    started = time.perf_counter()
    outcome, budgets = _run(jobs, started)
    seconds = time.perf_counter() - started
    done = [job for job in jobs if job.id in outcome.rows]
    rows = [outcome.rows[job.id] for job in done]
    text, has_passed = report(done, rows, budgets, broken | outcome.failures)
    cpu_seconds = sum(row.get("cpu_seconds", 0) for row in rows)
    print("\n" + "\n\n".join((text, *outcome.notes)))
    print(f"\n{len(rows)} rows in {seconds / 60:.1f} minutes", end=" ")
    print(f"({cpu_seconds / 60:.1f} of processor time in compilers)")
    if JSON.value:
        for row in rows:
            row["problems"] = problems(row, budgets)
        found = {"versions": versions(), "seconds": seconds, "cpu_seconds": cpu_seconds}
        found |= {"passed": has_passed, "rows": rows, "broken": broken}
        found |= {"failures": outcome.failures}
        Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if not has_passed:
        sys.exit(1)


def _chosen_jobs() -> tuple[list[CompileJob], dict[str, str]]:
    """The jobs that the flags name, and why modules of cases are broken; `ValueError` for an
    unknown name."""
    matrix = load_matrix()
    targets = choose("targets", TARGETS.value, target_names())
    operators = choose("kernels", KERNELS.value, kernel_cases.operators())
    presets = choose("presets", PRESETS.value, list(matrix["presets"]))
    structures = choose("structures", STRUCTURES.value, list(matrix["structures"]))
    cases, broken = kernel_cases.load_all(operators)
    return jobs_for(matrix, targets, cases, presets, structures), broken


def _run(jobs: Sequence[CompileJob], started: float) -> tuple[Outcome, dict[str, Any]]:
    """What the flags ask for, each row printed as it is done; and the budgets it was judged by."""

    def run(jobs: Sequence[CompileJob], on_row: OnRow, end: float) -> list[Row]:
        def show(row: Row) -> None:
            elapsed = time.perf_counter() - started
            print(f"{elapsed:6.0f} s  {row['id']}: {row['status']}", flush=True)
            on_row(row)

        return run_jobs(jobs, show, end=end)

    ledger, compilers = Ledger.load(), versions()
    inputs = Inputs(load_matrix(), compilers).all(jobs)
    gate = Gate(ledger, inputs, load_budgets(), run, ledger.save, RECORD.value)
    if CHECK_LEDGER.value:
        return gate.check(jobs, seed=SAMPLE.value, budget_s=BUDGET_S.value), gate.budgets
    for platform in sorted({load_target(job.target).platform for job in jobs}):
        ledger.use_compilers(platform, compilers)
    if all(f.value == "all" for f in (TARGETS, KERNELS, PRESETS, STRUCTURES)):
        ledger.keep_only(jobs)
    outcome = gate.compile_changed(jobs) if CHANGED.value else gate.compile_all(jobs)
    ledger.save()
    if RECORD.value:
        record_budgets(list(outcome.rows.values()))
    return outcome, gate.budgets


if __name__ == "__main__":
    app.run(main)
