"""The device check: every GPU kernel and the engine on the GPU at hand, in one command.

    jaxinfer doctor --json=out.json
    jaxinfer doctor --operators=paged_attention --packages=FOLDER
    jaxinfer doctor --rehearse      # tiny shapes, interpreters, no GPU

The check takes at most `--minutes` and ends with a short table. It measures, in this order:

1. the device: copy bandwidth, rate of bfloat16 products;
2. for `--cases` of each operator (`kernel_cases/`), headline cases first, the GPU backends'
   agreement with the reference on the same device, and their time, within the part of the time that
   is not reserved for what follows;
3. the engine with random weights in the shape of Llama-3-8B, bfloat16: decoding with 1, 32 and 256
   rows, the time to the first token of 8,184, how long the device waits for the host between steps,
   and the step with and without the options that the engine gives XLA;
4. PyTorch's time for the same cases, where a case has a peer.

Percentages are relative to the rates that the device reached in this run.

JAX has no device events, so a call is timed as many calls in one program, less the same program
with two (`device_check/timing.py`). PyTorch is timed by CUDA events, in a process of its own.

Everything runs in child processes under a watchdog: a child that hangs is killed, and the table
reports it. The exit code is 1 if anything disagrees or could not be measured; cases that are no
headlines may be left out for lack of time.

The check needs jax with CUDA, triton, jax-triton and the dependencies of jaxinfer. Packages that
the environment lacks can be unpacked wheels (`python -m zipfile -e X.whl FOLDER`) in a folder that
`--packages` names. Without jax-triton every GPU backend declines, and the table reports it; without
PyTorch there are no peers.
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
ENGINE = flags.DEFINE_boolean("engine", True, "Also run the engine.")
PEERS = flags.DEFINE_boolean("peers", True, "Also time PyTorch, where a case has a peer.")
CASES = flags.DEFINE_integer("cases", 6, "Cases of an operator, at most; headlines first.", 1)
MINUTES = flags.DEFINE_float("minutes", 8, "The time limit; no part begins after it.", 0.1)
PACKAGES = flags.DEFINE_string("packages", None, "A folder of packages that are not installed.")
REHEARSE = flags.DEFINE_boolean("rehearse", False, "Tiny, interpreted, on the CPU.")
JSON = flags.DEFINE_string("json", None, "Also write everything that was found to this file.")


def load_cases(
    names: list[str], platform: str, *, rehearse: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first `--cases` of every operator for the platform, and a row for every broken
    module."""
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
            print(f"{name}: {left} of {len(fitting)} cases are left out (--cases)")
    return found, rows


def run_device_check(
    names: list[str], folders: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the check; return all rows, and the device's measured rates."""
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
        ceilings = budget.run(child, job, plan.CEILING_SECONDS)
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
        rows, ceilings = run_device_check(names, folders)
        seconds = time.perf_counter() - started
        passed = table.has_passed(rows)
        if JSON.value:
            found = {"passed": passed, "seconds": seconds, "ceilings": ceilings, "rows": rows}
            found["rehearsal"] = REHEARSE.value
            Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        what = "a rehearsal: sizes and times mean nothing" if REHEARSE.value else "all of it"
        print(table.render(rows, {} if REHEARSE.value else ceilings))
        print(f"\n{len(rows)} rows in {seconds:.0f} s, {what}")
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
