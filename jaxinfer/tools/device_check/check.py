"""The device check: every GPU kernel and the engine on the GPU at hand, in one command.

    jaxinfer doctor --json=out.json
    jaxinfer doctor --operators=paged_attention --packages=FOLDER
    jaxinfer doctor --rehearse      # tiny shapes, interpreters, no GPU

Takes at most `--minutes`, and prints a short table last. In this order: what the device gives (copy
bandwidth, rate of bfloat16 products); for `--cases` of each operator (`kernel_cases/`), headline
cases first, the GPU backends' agreement with the reference on the same device, and their time, as
long as the time lasts, of which the rest keeps its share; the engine with
random weights in the shape of Llama-3-8B, bfloat16: decode at 1, 32 and 256 rows, the time to the
first token of 8,184, how long the device waits for the host between steps, and the step with and
without the options that the engine gives XLA; PyTorch's time for the same cases, where a case has a
peer. Percentages are of what the device gave in this run.

JAX has no device events: a call's time is that of many calls in one program, less the same program
with two (`device_check/timing.py`). PyTorch is timed by CUDA events, in a process of its own.

Everything runs in child processes under a watchdog: what hangs is killed, and the table says so.
Exits with 1 if anything disagrees or could not be measured; a case that is no headline may be left
for want of time.

Needs jax with CUDA, triton, jax-triton and what jaxinfer imports (gguf, say); jaxinfer itself need
not be installed. What the environment lacks is brought as unpacked wheels (`python -m zipfile -e
X.whl FOLDER`) in a folder that `--packages` names. Without jax-triton every GPU backend declines,
and the table says so; without PyTorch there are no peers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxinfer.tools.device_check.setting import environment, search_path

FLAGS = flags.FLAGS

OPERATORS = flags.DEFINE_string("operators", "all", "Kernels: all, none, or names of operators.")
ENGINE = flags.DEFINE_boolean("engine", True, "Run the engine too.")
PEERS = flags.DEFINE_boolean("peers", True, "Time PyTorch too, where a case has a peer.")
CASES = flags.DEFINE_integer("cases", 6, "Cases of an operator, at most; headlines first.", 1)
MINUTES = flags.DEFINE_float("minutes", 8, "What is not begun by then is not run.", 0.1)
PACKAGES = flags.DEFINE_string("packages", None, "A folder of packages that are not installed.")
REHEARSE = flags.DEFINE_boolean("rehearse", False, "Tiny, interpreted, on the CPU.")
JSON = flags.DEFINE_string("json", None, "Also write everything that was found to this file.")


def load_cases(
    names: list[str], platform: str, *, rehearse: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`--cases` of every operator that are for the platform, and a row for every module that is
    broken."""
    from jaxinfer.tools import kernel_cases
    from jaxinfer.tools.device_check import plan

    found, rows = {}, []
    for name in names:
        row = {"kind": "module", "name": f"kernel_cases/{name}.py"}
        try:
            cases = kernel_cases.load(name, tiny=rehearse)
        except ValueError as error:
            rows.append(row | {"status": "broken", "reason": str(error)})
            continue
        fitting = plan.headlines_first(cases, platform)
        found[name] = plan.headlines_first(cases, platform, CASES.value)
        if left := len(fitting) - len(found[name]):
            print(f"{name}: {left} of {len(fitting)} cases are not asked for (--cases)")
    return found, rows


def run(names: list[str], folders: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows, and what the device gives."""
    from jaxinfer.tools.device_check import plan, table
    from jaxinfer.tools.job_process import JobProcess

    rehearse, budget = REHEARSE.value, plan.TimeBudget(60 * MINUTES.value)
    command = [sys.executable, "-m", "jaxinfer.tools.device_check.worker"]
    settings = environment(folders, rehearse=rehearse)
    cases, broken = load_cases(names, "gpu", rehearse=rehearse)
    reserved = 0.0
    if not rehearse:
        reserved += plan.ENGINE_RESERVE * ENGINE.value + plan.PEER_RESERVE * PEERS.value
        reserved = min(reserved, budget.left() / 2)
    with JobProcess(command, settings) as child:
        job = {"kind": "ceilings", "rehearse": rehearse}
        ceilings = budget.ask(child, job, plan.CEILING_SECONDS)
        kernels = plan.kernel_rows(cases, "gpu")
        if ceilings["status"] == "measured":
            plan.check_kernels(child, budget, kernels, rehearse, reserved)
    if ceilings["status"] != "measured":  # there is no device to go on with
        return [{"kind": "ceilings", "name": "the device", **ceilings}], {}
    rows = [*broken, *kernels]
    if ENGINE.value:
        with JobProcess(command, settings) as child:
            rows += plan.check_engine(child, budget, rehearse, min(reserved, plan.PEER_RESERVE))
    if PEERS.value:
        with JobProcess(command, settings) as child:
            plan.check_peers(child, budget, kernels, rehearse)
    for row in rows:
        table.judge(row, {} if rehearse else ceilings)
    return rows, ceilings


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    started = time.perf_counter()
    with search_path(PACKAGES.value) as folders:
        from jaxinfer.tools import kernel_cases
        from jaxinfer.tools.compile_gate.matrix import choose
        from jaxinfer.tools.device_check import table

        try:
            names = choose("operators", OPERATORS.value, kernel_cases.operators())
        except ValueError as error:
            raise app.UsageError(str(error)) from error
        rows, ceilings = run(names, folders)
        seconds = time.perf_counter() - started
        passed = table.has_passed(rows)
        if JSON.value:
            found = {"passed": passed, "seconds": seconds, "ceilings": ceilings, "rows": rows}
            found["rehearsal"] = REHEARSE.value
            Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        what = "a rehearsal: sizes and times mean nothing" if REHEARSE.value else "all of it"
        print(table.text(rows, {} if REHEARSE.value else ceilings))
        print(f"\n{len(rows)} rows in {seconds:.0f} s, {what}")
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
