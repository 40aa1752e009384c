"""The compile gate's verdicts against the recorded budgets, and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.tools.compile_gate.matrix import CompileJob

BUDGETS = Path(__file__).parent / "budgets.json"

Row = dict[str, Any]
Budgets = Mapping[str, Mapping[str, float]]  # job id -> names of `per_layer` -> counts


def load_budgets(path: Path = BUDGETS) -> dict[str, dict[str, float]]:
    """The launches a layer that each step may take; empty where none were recorded."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def record_budgets(rows: Sequence[Row], path: Path = BUDGETS) -> None:
    """Write the counts of `rows` as budgets; budgets of steps that did not run stay."""
    budgets = load_budgets(path)
    budgets |= {row["id"]: row["per_layer"] for row in rows if "per_layer" in row}
    path.write_text(json.dumps(budgets, indent=4, sort_keys=True) + "\n", "utf-8")


def problems(row: Row, budgets: Budgets) -> list[str]:
    """The reasons why a row fails the gate; empty if it passes."""
    if row["status"] != "compiled":
        return [f"{row['status']}: {row['reason']}"]
    found = []
    if row.get("spills"):
        found.append(f"spills {row['spills']:,} bytes of registers to memory")
    memory = row.get("memory")
    if memory and not memory["fits"]:
        found.append(f"takes {gib(memory['total'])} of {gib(memory['limit'])} GiB")
    if "per_layer" in row:
        budget = budgets.get(row["id"])
        if budget is None:
            found.append("has no recorded launches a layer; run with --record_budgets")
        else:
            found += [
                f"{name} a layer: {count:g}, recorded {budget.get(name, 0):g}"
                for name, count in row["per_layer"].items()
                if count > budget.get(name, 0)
                or (name.startswith("collectives") and count != budget.get(name, 0))
            ]
    return found + row.get("collective_problems", [])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def kernel_columns(job: CompileJob, row: Row) -> list[str]:
    """The columns of a kernel's line."""
    case = [job.target, f"{job.name}/{job.values['backend']}", job.values["case"]]
    if row["status"] != "compiled":
        return [*case, row["status"], "", "", ""]
    count = row["launches"]
    chip = []
    if "vmem" in row:
        chip.append(f"{row['vmem'] / 2**20:.1f} MiB VMEM")
    if "registers" in row:
        chip.append(f"{row['registers']} registers, {row['shared'] / 1024:.0f} KiB shared")
    if "temporaries" in row:
        chip.append(f"{row['temporaries'] / 2**20:.1f} MiB temporaries")
    return [*case, f"{row['seconds']:.1f} s", _launches(count["straight"], count["loops"],
            count["in_loops"]), "; ".join(chip), str(row.get("spills", 0))]  # fmt: skip


def step_columns(job: CompileJob, row: Row) -> list[str]:
    """The columns of a step's line."""
    head = [job.target, job.name]
    if row["status"] != "compiled":
        return [*head, row["status"], *[""] * 8]
    memory, layer = row["memory"], row["per_layer"]
    parts = [gib(memory[name]) for name in ("weights", "pages", "temporaries")]
    crossing = ", ".join(
        f"{kind} {c['count']:g}" for kind, c in row["collectives_per_layer"].items()
    )
    return [
        *head,
        f"{row['seconds']:.0f} s",
        *parts,
        f"{gib(memory['total'])} of {gib(memory['limit'])}",
        f"{'yes' if memory['fits'] else 'NO'}, by {row['compiled']}",
        f"{row['tokens_cached']:,}",
        _launches(layer["launches"], layer["loops"], layer["launches_in_loops"])
        + f" (of {row['operators_per_layer']} operators)",
        crossing or "none",
    ]


def structure_columns(job: CompileJob, row: Row) -> list[str]:
    """The columns of a structure's line."""
    head = [job.target, job.name]
    if row["status"] != "compiled":
        return [*head, row["status"], *[""] * 3]
    count = row["launches"]
    return [
        *head,
        f"{row['seconds']:.1f} s",
        str(row["num_layers"]),
        _launches(count["straight"], count["loops"], count["in_loops"]),
        f"{row['temporaries'] / 2**20:.1f} MiB",
    ]


def _launches(straight: float, loops: float, in_loops: float) -> str:
    return f"{straight:g}" + (f" + {loops:g} loops of {in_loops:g}" if loops else "")


KERNEL_HEAD = ["target", "kernel", "case", "compiled", "launches", "takes", "spills"]
STEP_HEAD = ["target", "preset", "compiled", "weights", "pages", "temporaries", "GiB in all"]
STEP_HEAD += ["fits", "tokens cached", "launches a layer", "collectives a layer"]
STRUCTURE_HEAD = ["target", "structure", "compiled", "layers", "launches", "temporaries"]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format lines as left-aligned columns below a head."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    )


def report(
    jobs: Sequence[CompileJob], rows: Sequence[Row], budgets: Budgets, failures: Mapping[str, str]
) -> tuple[str, bool]:
    """Return the text to print, and whether everything passed.

    `failures` maps what failed to why, for failures outside the rows, such as an operator whose
    cases could not be read.
    """
    parts, pairs = [], list(zip(jobs, rows, strict=True))
    for kind, head, columns in (
        ("kernel", KERNEL_HEAD, kernel_columns),
        ("step", STEP_HEAD, step_columns),
        ("structure", STRUCTURE_HEAD, structure_columns),
    ):
        lines = [columns(job, row) for job, row in pairs if job.kind == kind]
        if lines:
            parts.append(table(head, lines))
    failed = [[name, why] for name, why in failures.items()]
    failed += [[row["id"], why] for row in rows for why in problems(row, budgets)]
    if failed:
        parts.append("FAILED\n" + table(["what", "why"], failed))
    return "\n\n".join(parts), not failed
