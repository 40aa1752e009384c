"""Autotuning: find the best tiling of every kernel's case, on a device or by a compiler.

    jaxinfer tune --operators=paged_attention --json=out.json
    jaxinfer tune --target=h100        # no device: compile and rank
    jaxinfer tune --rehearse           # tiny, interpreted, on a CPU

On a GPU or TPU the `--keep` candidates that the model (`tuner/model.py`) ranks first are measured
against the current tiling, and their results compared with its result. A tiling that is faster by 3
% over all cases of its key is written to `kernels/tuned/<device kind>.json`, where the backends
find it. Without a device, `--target` names a chip of `targets/`: candidates that its compiler
refuses, that spill or that do not fit are dropped, and the others are ranked by the model of bytes
and occupancy in `tuner/model.py` (TPUs have no such model, so the backend's own order stays).
Nothing is then written without `--write`.

Every case runs in a child process under a watchdog: one that hangs is killed and named.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxinfer.tools.device_check.setting import environment, search_path

FLAGS = flags.FLAGS

OPERATORS = flags.DEFINE_string("operators", "all", "Kernels: all, or names of operators.")
TARGET = flags.DEFINE_string("target", None, "Rank for this chip of targets/, without a device.")
REHEARSE = flags.DEFINE_boolean("rehearse", False, "Tiny cases, interpreted, on the CPU.")
KEEP = flags.DEFINE_integer("keep", 8, "Candidates of a case that are measured.", lower_bound=1)
SECONDS = flags.DEFINE_integer("seconds", 300, "The time limit of one case.", lower_bound=1)
WRITE = flags.DEFINE_boolean("write", None, "Write the tilings; by default if they were measured.")
FOLDER = flags.DEFINE_string("folder", None, "Where to write them, if not kernels/tuned.")
PACKAGES = flags.DEFINE_string("packages", None, "A folder of packages that are not installed.")
JSON = flags.DEFINE_string("json", None, "Also write everything that was found to this file.")

SHOWN = 3  # tilings per case


def tuning_jobs(operators: list[str], platform: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """List a job for every tunable case and backend of the platform, and the broken modules."""
    from jaxinfer.tools import kernel_cases
    from jaxinfer.tools.compile_gate.matrix import load_target
    from jaxinfer.tools.kernel_calls import backend_names

    found, broken = [], {}
    target = load_target(TARGET.value) if TARGET.value else None
    for operator in operators:
        try:
            cases = kernel_cases.load(operator, tiny=REHEARSE.value)
        except ValueError as error:
            broken[operator] = str(error)
            continue
        for name, case in cases.items():
            if not case.is_tunable or (target is not None and target.name not in case.targets):
                continue
            found += [
                {"kind": "tune", "operator": operator, "case": name, "backend": backend,
                 "rehearse": REHEARSE.value, "keep": KEEP.value, "target": TARGET.value}
                for backend in backend_names(case, platform)
                if backend != "xla" and (target is None or target.runs(backend))
            ]  # fmt: skip
    return found, broken


def describe(row: dict[str, Any]) -> str:
    """Describe a case's best tilings, and why others were dropped."""
    from jaxinfer.tools.tuner.files import figure

    head = f"{row['operator']}/{row['backend']} {row['case']}"
    if row["status"] != "measured":
        return f"{head}: {row['status']}: {row['reason']}"
    lines = [f"{head} [{row['key']}]"]
    sound = [t for t in row["tried"] if "reason" not in t]
    for tried in sorted(sound, key=lambda t: figure(t) or 0.0)[:SHOWN]:
        seconds = figure(tried)
        cost = "compiles" if seconds is None else f"{seconds * 1e6:.1f} us"
        how = "" if seconds is None or "seconds" in tried else " by the model"
        lines.append(f"    {cost}{how}  {tried['tiling'] or 'current'}")
    failed = [t for t in row["tried"] if "reason" in t]
    if failed:
        lines.append(f"    {len(failed)} dropped, as: {failed[0]['reason']}")
    return "\n".join(lines)


def tune_operators(names: list[str], folders: list[str]) -> bool:
    """Tune the operators; return whether nothing failed."""
    from jaxinfer.tools.compile_gate.matrix import load_target
    from jaxinfer.tools.compile_gate.run import ENVIRONMENT
    from jaxinfer.tools.job_process import JobProcess

    settings = environment(folders, rehearse=REHEARSE.value)
    if TARGET.value:
        settings |= ENVIRONMENT
    rows: list[dict[str, Any]] = []
    with JobProcess(
        [sys.executable, "-m", "jaxinfer.tools.device_check.worker"], settings
    ) as child:
        if TARGET.value:
            platform = load_target(TARGET.value).platform
        else:
            found = child.run({"kind": "device", "rehearse": REHEARSE.value}, SECONDS.value)
            if found["status"] != "measured":
                raise app.UsageError(f"no device: {found['reason']}; give --target")
            platform = found["platform"]
        jobs, broken = tuning_jobs(names, platform)
        for job in jobs:
            rows.append(job | child.run(job, SECONDS.value))
            print(describe(rows[-1]), flush=True)
    chosen = write_best(rows)
    for name, why in broken.items():
        print(f"{name}: {why}")
    if JSON.value:
        found = {"rows": rows, "broken": broken}
        found["chosen"] = [[*place, winner] for place, winner in chosen.items()]
        Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    failed = [row for row in rows if row["status"] not in ("measured", "declined")]
    return not failed and not broken


def write_best(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Print the tilings that beat the current ones, and write them if the flags say so."""
    from jaxinfer.kernels import tuning
    from jaxinfer.tools.tuner import files

    groups = files.group_by_key(rows)
    winners = {place: files.best_tiling(group) for place, group in groups.items()}
    chosen = {place: winner for place, winner in winners.items() if winner is not None}
    how = ", by the model" if TARGET.value else ""
    print(f"\n{len(groups)} keys; {len(chosen)} have a better tiling than the current one{how}")
    for (operator, key), winner in chosen.items():
        print(f"    {operator} [{key}]: {winner['share']:.2f} of the time, {winner['tiling']}")
    wants = WRITE.value if WRITE.value is not None else not (TARGET.value or REHEARSE.value)
    if wants and chosen:
        kind = next(row["device"] for row in rows if row["status"] == "measured")
        name = tuning.file_of(kind).name
        path = Path(FOLDER.value or tuning.FOLDER) / name
        files.write_tilings(path, chosen)
        print(f"written to {path}")
    return chosen


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if TARGET.value and REHEARSE.value:
        raise app.UsageError("--target and --rehearse: there is no chip to rehearse; give one")
    if REHEARSE.value and WRITE.value and not FOLDER.value:
        raise app.UsageError("--rehearse --write: give --folder; its times mean nothing")
    with search_path(PACKAGES.value) as folders:
        from jaxinfer.tools import kernel_cases
        from jaxinfer.tools.compile_gate.matrix import choose, target_names

        try:
            names = choose("operators", OPERATORS.value, kernel_cases.operators())
            if TARGET.value:
                choose("target", TARGET.value, target_names())
        except ValueError as error:
            raise app.UsageError(str(error)) from error
        if not tune_operators(names, folders):
            sys.exit(1)


if __name__ == "__main__":
    app.run(main)
