"""What a load brought: one record a request, and the figures that are made of all of them.

    time to first token  from the moment the client turned to the request (connecting, sending and
                         queueing count) to the first event with text in it
    inter-token latency  between one such event and the next; a server that joins tokens into one
                         event has fewer and longer ones, which `tokens_per_event` shows
    goodput              requests that were answered whole, began within the SLO's time to first
                         token, and whose mean time a token after it is within the SLO's too

A client that is itself too slow makes every figure wrong, so it is measured too: how late requests
were sent, how late its event loop answers a timer, and how much processor time it took.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# Above these limits the figures may be those of the client, not of the server.
MAX_LATE_S = 0.02
MAX_CPU_SHARE = 0.8


@dataclasses.dataclass
class Record:
    """One request. Times are in seconds since the load's start."""

    index: int
    scheduled: float
    sent: float = 0.0  # when the client began to send it
    times: list[float] = dataclasses.field(default_factory=list)  # times of the events with text
    end: float = 0.0
    prompt_tokens: int = 0  # the server's count; 0: it reported none
    output_tokens: int = 0  # the server's count, or else the number of events
    status: str = ""  # of the protocol: "200", "429", "OK", "RESOURCE_EXHAUSTED"; "": none
    error: str | None = None  # the kind: the status, "timeout", "disconnected", ...
    detail: str = ""  # the error's message

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def e2e_s(self) -> float:
        return self.end - self.sent

    @property
    def late_s(self) -> float:
        return self.sent - self.scheduled

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive events."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def token_s(self) -> float:
        """The mean seconds a token after the first; 0 with fewer than two tokens."""
        if self.output_tokens < 2 or not self.times:
            return 0.0
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """Whether the answer is complete and within the objective."""
        in_time = self.ttft_s is not None and self.ttft_s <= slo.ttft_s
        return self.error is None and in_time and self.token_s <= slo.token_s


@dataclasses.dataclass(frozen=True)
class Slo:
    """Service-level objective: seconds to the first token, and a token after it."""

    ttft_s: float
    token_s: float


@dataclasses.dataclass
class LoadResult:
    """The records of a load, from one client process or several."""

    records: list[Record]
    lags_s: list[float]  # sampled delays of the client's event loop
    cpu_shares: list[float]  # share of a core that each client process used

    @classmethod
    def merged(cls, parts: Iterable[LoadResult]) -> LoadResult:
        """Merge the results of several client processes that started simultaneously."""
        whole = cls([], [], [])
        for part in parts:
            whole.records += part.records
            whole.lags_s += part.lags_s
            whole.cpu_shares += part.cpu_shares
        whole.records.sort(key=lambda record: record.index)
        return whole

    @property
    def answered(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    @property
    def seconds(self) -> float:
        """Seconds from the sending of the first request to the end of the last."""
        if not self.records:
            return 0.0
        return max(r.end for r in self.records) - min(r.sent for r in self.records)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of answered requests."""
        tokens = sum(record.output_tokens for record in self.answered)
        return tokens / self.seconds if self.seconds else 0.0

    def warnings(self) -> list[str]:
        """The reasons why the figures may be limited by the client."""
        texts = []
        late = percentile([r.late_s for r in self.records], 99)
        lag, share = percentile(self.lags_s, 99), max(self.cpu_shares, default=0.0)
        if late > MAX_LATE_S:
            texts.append(f"requests were sent {late * 1e3:.0f} ms late (P99)")
        if lag > MAX_LATE_S:
            texts.append(f"the client's event loop answered {lag * 1e3:.0f} ms late (P99)")
        if share > MAX_CPU_SHARE:
            texts.append(f"a client process took {share:.0%} of a core")
        return [f"{text}: the client may be the limit; raise --processes" for text in texts]


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linearly interpolated between the nearest ranks; 0 of no values."""
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _spread_ms(values: Sequence[float]) -> dict[str, float | int]:
    figures: dict[str, float | int] = {"count": len(values)}
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        figures[name] = percentile(values, percent) * 1e3
    return figures


def summary(result: LoadResult, slo: Slo) -> dict[str, Any]:
    """All figures of a load as JSON values; latencies are in milliseconds, of answered requests."""
    answered, seconds = result.answered, result.seconds
    good = [record for record in answered if record.meets(slo)]
    events = sum(len(record.times) for record in answered)
    tokens = sum(record.output_tokens for record in answered)
    count = len(result.records)
    rate = lambda number: number / seconds if seconds else 0.0
    errors = collections.Counter(r.error for r in result.records if r.error is not None)
    examples = {r.error: r.detail for r in reversed(result.records) if r.error is not None}
    return {
        "seconds": seconds,
        "requests": count,
        "answered": len(answered),
        "requests_per_s": rate(len(answered)),
        "prompt_tokens": sum(record.prompt_tokens for record in answered),
        "output_tokens": tokens,
        "output_tokens_per_s": result.tokens_per_s,
        "tokens_per_event": tokens / events if events else 0.0,
        "ttft_ms": _spread_ms([r.ttft_s for r in answered if r.ttft_s is not None]),
        "itl_ms": _spread_ms([gap for r in answered for gap in r.gaps_s]),
        "e2e_ms": _spread_ms([r.e2e_s for r in answered]),
        "goodput": {
            "slo_ttft_ms": slo.ttft_s * 1e3,
            "slo_itl_ms": slo.token_s * 1e3,
            "share": len(good) / count if count else 0.0,
            "requests_per_s": rate(len(good)),
        },
        "errors": dict(errors),
        "error_examples": examples,
        "client": {
            "late_ms": _spread_ms([record.late_s for record in result.records]),
            "lag_ms": _spread_ms(result.lags_s),
            "cpu_shares": result.cpu_shares,
            "warnings": result.warnings(),
        },
    }


def print_summary(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    f = figures
    print(
        f"{f['answered']} of {f['requests']} requests answered in {f['seconds']:.2f} s "
        f"({f['requests_per_s']:.2f} a second); {f['output_tokens']} tokens, "
        f"{f['output_tokens_per_s']:.1f} a second, {f['tokens_per_event']:.2f} an event"
    )
    rows = [["", "count", "P50", "P90", "P99", "most"]]
    names = {
        "time to first token, ms": f["ttft_ms"],
        "inter-token latency, ms": f["itl_ms"],
        "end to end, ms": f["e2e_ms"],
        "client late, ms": f["client"]["late_ms"],
        "client's event loop late, ms": f["client"]["lag_ms"],
    }
    for name, spread in names.items():
        numbers = [f"{spread[key]:.2f}" for key in ("p50", "p90", "p99", "max")]
        rows.append([name, str(spread["count"]), *numbers])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *rest = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([first.strip().ljust(widths[0]), *rest]))
    goodput = f["goodput"]
    print(
        f"goodput: {goodput['share']:.1%} of requests, {goodput['requests_per_s']:.2f} a second "
        f"(first token within {goodput['slo_ttft_ms']:g} ms, then {goodput['slo_itl_ms']:g} ms "
        "a token)"
    )
    for kind, number in f["errors"].items():
        print(f"error {kind}: {number} ({f['error_examples'][kind]})")
    for text in f["client"]["warnings"]:
        print(f"warning: {text}")
