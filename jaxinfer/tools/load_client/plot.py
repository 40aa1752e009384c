"""Plot a load: distributions of its latencies, and its course over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.tools.load_client.record import LoadResult, Slo


def write_plot(path: str | Path, result: LoadResult, slo: Slo, title: str) -> None:
    """Write a PNG of four panels; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2, 2)
    answered = result.answered
    ttft = [r.ttft_s * 1e3 for r in answered if r.ttft_s is not None]
    curves = {"time to first token": ttft, "end to end": [r.e2e_s * 1e3 for r in answered]}
    _distribution(panels[0, 0], curves, slo.ttft_s * 1e3, "milliseconds")
    gaps = {"inter-token latency": [gap * 1e3 for r in answered for gap in r.gaps_s]}
    _distribution(panels[0, 1], gaps, slo.token_s * 1e3, "milliseconds")
    _over_time(panels[1, 0], result)
    _starts(panels[1, 1], result, slo)
    figure.savefig(path, format="png", dpi=110)


def _distribution(
    axes: Any, curves: Mapping[str, Sequence[float]], slo_ms: float, unit: str
) -> None:
    """Plot the cumulative share of values."""
    for name, values in curves.items():
        if values:
            ordered = np.sort(values)
            axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=name)
    axes.axvline(slo_ms, color="tab:red", linestyle=":", label="SLO")
    axes.set(xscale="log", xlabel=unit, ylabel="share of all", ylim=(0, 1))
    _plain_ticks(axes.xaxis)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _over_time(axes: Any, result: LoadResult) -> None:
    """Plot events a second, and active requests."""
    times = [t for record in result.records for t in record.times]
    seconds = max(1.0, max((record.end for record in result.records), default=1.0))
    edges = np.linspace(0, seconds, 61)
    counts, _ = np.histogram(times, edges)
    axes.stairs(counts / (edges[1] - edges[0]), edges, label="text events a second")
    axes.set(xlabel="seconds since the start", ylabel="events a second")
    axes.grid(alpha=0.3)
    right_axis = axes.twinx()
    changes = sorted(
        [(record.sent, 1) for record in result.records]
        + [(record.end, -1) for record in result.records]
    )
    under_way = np.cumsum([change for _, change in changes])
    right_axis.step([t for t, _ in changes], under_way, where="post", color="tab:orange")
    right_axis.set_ylabel("active requests", color="tab:orange")
    axes.legend(loc="upper right")


def _starts(axes: Any, result: LoadResult, slo: Slo) -> None:
    """Plot each request at the time it was sent: its time to first token, or its failure."""
    good = [(r.sent, r.ttft_s * 1e3) for r in result.answered if r.ttft_s is not None]
    failed = [(r.sent, r.e2e_s * 1e3) for r in result.records if r.error is not None]
    for name, points, marker in (("first token", good, "."), ("failed after", failed, "x")):
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=f"{name} ({len(points)})")
    axes.axhline(slo.ttft_s * 1e3, color="tab:red", linestyle=":", label="SLO")
    axes.set(xlabel="sent, seconds since the start", ylabel="milliseconds", yscale="log")
    _plain_ticks(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _plain_ticks(axis: Any) -> None:
    """Label 1, 2, 5, 10, ... on a logarithmic axis; powers of ten are too few in a narrow range."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
