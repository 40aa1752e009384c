"""The device check's table: measurements relative to the device's rates in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.tools.compile_gate.report import table

Row = dict[str, Any]
HEAD = ["kernel", "case", "error", "agrees", "median us", "of copy", "of matrix", "PyTorch us",
        "PyTorch / ours"]  # fmt: skip
ENGINE_KINDS = ("decode", "first_token", "options")
ENGINE_HEAD = ["engine", "measured", "of floor", "details"]


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def judge(row: Row, ceilings: Mapping[str, Any]) -> None:
    """Add to a row its shares of the device's rates."""
    bandwidth, rate = ceilings.get("bandwidth"), ceilings.get("matrix_rate")
    seconds = row.get("seconds")
    if row["kind"] == "kernel" and seconds and bandwidth and rate:
        row["of_copy"] = row["bytes_moved"] / seconds / bandwidth
        row["of_matrix"] = row["flops"] / seconds / rate
    if row["kind"] == "kernel" and seconds and row.get("peer_seconds"):
        row["ratio"] = row["peer_seconds"] / seconds
    if row["kind"] == "decode" and bandwidth and "step_seconds" in row:
        row["of_floor"] = row["floor_bytes"] / bandwidth / row["step_seconds"]
    if row["kind"] == "first_token" and rate and seconds:
        row["of_floor"] = row["floor_flops"] / rate / seconds


def _kernel_line(row: Row) -> list[str]:
    us = lambda seconds: "" if not seconds else f"{seconds * 1e6:.1f}"
    verdict: str = row["status"]
    if "agrees" in row:
        verdict = "yes" if row["agrees"] else "NO"
    return [
        f"{row['operator']}/{row['backend']}",
        row["case"],
        f"{row['error']:.1e}" if "error" in row else "",
        verdict,
        us(row.get("seconds")),
        percent(row.get("of_copy")),
        percent(row.get("of_matrix")),
        us(row.get("peer_seconds")),
        f"{row['ratio']:.2f}" if "ratio" in row else "",
    ]


def _engine_line(row: Row) -> list[str]:
    if row["status"] != "measured":
        return [row["name"], row["status"], "", ""]
    if row["kind"] == "first_token":
        return [row["name"], f"{row['seconds'] * 1e3:.1f} ms", percent(row.get("of_floor")),
                f"chunks of {row['chunk']}"]  # fmt: skip
    if row["kind"] == "options":
        given = ", ".join(f"{name}={value}" for name, value in row["options"].items()) or "none"
        without = f"{row['without_seconds'] * 1e3:.2f} ms without, device alone; {given}"
        return [row["name"], f"{row['with_seconds'] * 1e3:.2f} ms with", "", without]
    gap = "host-bound" if row["is_host_bound"] else f"gap {row['gap_seconds'] * 1e6:.0f} us"
    details = (
        f"step {row['step_seconds'] * 1e3:.2f} ms, device alone "
        f"{row['device_step_seconds'] * 1e3:.2f}, {gap}, host {row['host_seconds'] * 1e6:.0f} us"
    )
    speed = f"{row['tokens_per_second']:,.0f} tokens/s"
    return [row["name"], speed, percent(row.get("of_floor")), details]


def problems(rows: Sequence[Row]) -> list[list[str]]:
    """What failed, and why."""
    found = []
    for row in rows:
        name = row["name"]
        if row["status"] != "measured":
            found.append([name, f"{row['status']}: {row['reason']}"])
        elif row.get("agrees") is False:
            found.append([name, f"error {row['error']:.2e}, allowed {row['tolerance']:.0e}"])
        if row.get("time_problem"):
            found.append([name, f"not timed: {row['time_problem']}"])
        if row.get("peer_problem"):
            found.append([name, f"PyTorch: {row['peer_problem']}"])
    return found


def has_passed(rows: Sequence[Row]) -> bool:
    """Whether everything was measured and agrees. A missing peer is no failure, nor is a case that
    was left out for lack of time, unless it is a headline."""
    begun = [row for row in rows if row["status"] != "not run" or row.get("is_headline", True)]
    return bool(begun) and all(
        row["status"] == "measured" and row.get("agrees") is not False
        and not row.get("time_problem") for row in begun
    )  # fmt: skip


def render(rows: Sequence[Row], ceilings: Mapping[str, Any]) -> str:
    """The whole report as text."""
    parts = []
    kernels = [_kernel_line(row) for row in rows if row["kind"] == "kernel"]
    if kernels:
        parts.append(table(HEAD, kernels))
    engine = [_engine_line(row) for row in rows if row["kind"] in ENGINE_KINDS]
    if engine:
        parts.append(table(ENGINE_HEAD, engine))
    if wrong := problems(rows):
        parts.append("FAILED\n" + table(["what", "why"], wrong))
    if "bandwidth" in ceilings:
        parts.append(
            f"{ceilings['device']}: copy {ceilings['bandwidth'] / 1e12:.2f} TB/s (read and "
            f"written), bfloat16 products {ceilings['matrix_rate'] / 1e12:.0f} TFLOP/s"
        )
    return "\n\n".join(parts)
