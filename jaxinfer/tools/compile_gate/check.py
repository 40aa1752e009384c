"""The compile gate: every kernel and every preset's whole step, compiled for chips not at hand.

    make compile-check
    jaxinfer compile-check --targets=v5e,h100 --kernels=all --presets=none --json=out.json

The real TPU and GPU compilers run, on a CPU, in an environment that has their packages (`make
compile-check` makes one). Nothing is allocated and nothing runs: it tells what a compiler refuses,
what does not fit, what spills and how many kernels a layer takes, not how long anything takes.
Kernels are those of `kernel_cases/`, whole steps and the structures of other models (a small step
of a layer or two) those of `compile_matrix.toml`, chips those of
`targets/`; the launches a layer that a step may take stand in `compile_budgets.json`. Exits with 1
if anything in its table failed: a compiler or a backend that refuses, registers that spill, a step
that does not fit or takes more launches a layer than recorded, a module of cases that is broken.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# Before JAX is imported: the cases are abstract, and no device is looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags

from jaxinfer.tools import kernel_cases
from jaxinfer.tools.compile_gate.matrix import choose, jobs_for, load_matrix, target_names
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

REQUIRED = (
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc-cu12",
    "triton",
    "jax-triton",
)
PACKAGES = ("jax", "jaxlib", *REQUIRED)


def versions() -> dict[str, str]:
    """Of the compilers, where installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def missing_packages() -> list[str]:
    """Packages without which no compiler is here."""
    installed = {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()}
    return [name for name in REQUIRED if name not in installed]


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    matrix = load_matrix()
    try:
        targets = choose("targets", TARGETS.value, target_names())
        operators = choose("kernels", KERNELS.value, kernel_cases.operators())
        presets = choose("presets", PRESETS.value, list(matrix["presets"]))
        structures = choose("structures", STRUCTURES.value, list(matrix["structures"]))
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    if missing := missing_packages():
        sys.exit(f"compile_check needs {', '.join(missing)}: run `make compile-check`")
    cases, broken = kernel_cases.load_all(operators)
    jobs = jobs_for(matrix, targets, cases, presets, structures)
    started = time.perf_counter()

    def show(row: dict[str, Any]) -> None:
        print(f"{time.perf_counter() - started:6.0f} s  {row['id']}: {row['status']}", flush=True)

    rows = run_jobs(jobs, show)
    seconds = time.perf_counter() - started
    if RECORD.value:
        record_budgets(rows)
    budgets = load_budgets()
    text, has_passed = report(jobs, rows, budgets, broken)
    cpu_seconds = sum(row.get("cpu_seconds", 0) for row in rows)
    print(f"\n{text}\n\n{len(rows)} rows in {seconds / 60:.1f} minutes", end=" ")
    print(f"({cpu_seconds / 60:.1f} of processor time in compilers)")
    if JSON.value:
        for row in rows:
            row["problems"] = problems(row, budgets)
        found = {"versions": versions(), "seconds": seconds, "cpu_seconds": cpu_seconds}
        found |= {"passed": has_passed, "rows": rows, "broken": broken}
        Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if not has_passed:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
