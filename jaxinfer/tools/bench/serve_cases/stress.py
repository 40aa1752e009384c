"""The serving cases of overload and of long steady load."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from jaxinfer.tools.bench.report import Measure
from jaxinfer.tools.bench.serve_cases.latency import (
    CLIENTS,
    CaseOptions,
    endpoints,
    wait_until_idle,
)
from jaxinfer.tools.bench.serve_cases.server import Server, running
from jaxinfer.tools.load_client.load import Endpoint, open_client, run_load
from jaxinfer.tools.load_client.record import LoadResult, percentile
from jaxinfer.tools.load_client.workload import Lengths, LoadJob, make_jobs, poisson_times

MAX_WAITING = 64  # queue limit in `overload`
REFUSED_MS = 100.0
MEMORY_PERCENT = 2.0
SOAK_WARM_S = 300.0  # a soak compares memory with that after so many seconds


def overload(options: CaseOptions) -> list[Measure]:
    """Send far more requests than the queue holds, all at once, on open connections."""
    count = options.count(500)
    server = options.server(f"serving.limits.max_waiting={MAX_WAITING}")
    measures: list[Measure] = []
    refused_by = {"HTTP": "HTTP 429", "gRPC": "RESOURCE_EXHAUSTED"}
    with running(server):
        targets = endpoints(server)
        targets["gRPC"] = dataclasses.replace(targets["gRPC"], api="frames")
        for name, target in targets.items():
            rounds: list[LoadResult] = []
            memory: list[int] = []
            for round_index in range(options.repeats + 1):
                prompts = options.prompts(round_index, len(measures))
                lengths = Lengths("fixed", (32,)), Lengths("fixed", (32,))
                jobs = make_jobs(prompts, *lengths, [0.0] * count, round_index)
                rounds.append(asyncio.run(_burst(target, jobs, options.timeout_s)))
                wait_until_idle(server)
                memory.append(server.rss_bytes)
            measures += _overload_measures(name, refused_by[name], rounds[1:], memory)
    return measures


async def _burst(target: Endpoint, jobs: Sequence[LoadJob], timeout_s: float) -> LoadResult:
    async with open_client(target, len(jobs)) as client:
        await asyncio.sleep(0.5)  # the server has taken all connections
        return await run_load(client, jobs, timeout_s=timeout_s)


def _overload_measures(
    name: str, refusal: str, rounds: Sequence[LoadResult], memory: Sequence[int]
) -> list[Measure]:
    records = [record for result in rounds for record in result.records]
    served = [float(len(result.answered)) for result in rounds]
    refused = [r for r in records if r.error == refusal]
    lost = [r for r in records if r.error not in (None, refusal)]
    for record in lost[:3]:
        print(f"overload, {name}: {record.error}: {record.detail}")
    waits = [r.e2e_s * 1e3 for r in refused]
    lags = [lag * 1e3 for result in rounds for lag in result.lags_s] or [0.0]
    print(
        f"overload, {name}: {len(refused)} refused, P50 {percentile(waits, 50):.1f} ms, "
        f"P99 {percentile(waits, 99):.1f} ms, most {max(waits, default=0.0):.1f} ms; "
        f"the client's event loop was up to {max(lags):.1f} ms late"
    )
    places = min(MAX_WAITING + CLIENTS, len(rounds[0].records))
    growth = (memory[-1] / memory[0] - 1) * 100
    case = f"overload, {name}"
    return [
        Measure(f"{case}: served", "requests", [min(served)], target=places),
        Measure(f"{case}: lost", "requests", [float(len(lost))], target=0, bound="at most"),
        Measure(
            f"{case}: refused in",
            "ms",
            [max(waits, default=0.0)],
            target=REFUSED_MS,
            bound="at most",
        ),
        Measure(f"{case}: memory", "% more", [growth], target=MEMORY_PERCENT, bound="at most"),
    ]


def soak(options: CaseOptions) -> list[Measure]:
    """Steady load over both endpoints for `minutes`; memory after the first five, and at the
    end."""
    seconds = options.minutes * 60
    warm_s = min(SOAK_WARM_S, seconds / 2)
    server = options.server()
    with running(server):
        samples, results = asyncio.run(_steady(options, server, seconds))
        metrics = wait_until_idle(server)
    base = next(rss for at, rss in samples if at >= warm_s)
    growth = (max(rss for at, rss in samples if at >= warm_s) / base - 1) * 100
    records = [record for result in results for record in result.records]
    failed = [record for record in records if record.error is not None]
    for record in failed[:3]:
        print(f"soak: {record.error}: {record.detail}")
    owned = metrics['jaxinfer_pages{state="owned"}']
    name = f"soak, {options.minutes:g} min"
    count = float(len(failed))
    return [
        Measure(f"{name}: memory", "% more", [growth], target=MEMORY_PERCENT, bound="at most"),
        Measure(f"{name}: failed", "requests", [count], target=0, bound="at most"),
        Measure(f"{name}: pages owned", "pages", [owned], target=0, bound="at most"),
        Measure(f"{name}: answered", "requests", [len(records) - count]),
    ]


async def _steady(
    options: CaseOptions, server: Server, seconds: float
) -> tuple[list[tuple[float, int]], list[LoadResult]]:
    """Return resident memory by seconds since the start, and the result of each endpoint's load."""
    start = time.monotonic()
    results, loads = [], []
    for side, target in enumerate(endpoints(server).values()):
        seed = options.seed * 2 + side
        count = max(1, round(options.rate / 2 * seconds))
        times = poisson_times(options.rate / 2, count, seed)
        lengths = Lengths("uniform", (16, 128)), Lengths("lognormal", (48, 0.8, 8, 192))
        jobs = make_jobs(options.prompts(side), *lengths, times, seed)
        results.append(LoadResult([], [], []))
        load = _load_one(target, jobs, options.timeout_s, start, results[-1])
        loads.append(asyncio.create_task(load))
    samples = []
    step_s = min(60.0, seconds / 6)
    pending = set(loads)
    while pending:
        _, pending = await asyncio.wait(loads, timeout=step_s - (time.monotonic() - start) % step_s)
        at = time.monotonic() - start
        samples.append((at, server.rss_bytes))
        _print_minute(at, step_s, samples[-1][1], results)
        if any(task.done() and task.exception() for task in loads):
            break
    await asyncio.gather(*loads)
    return samples, results


async def _load_one(
    target: Endpoint, jobs: Sequence[LoadJob], timeout_s: float, start: float, result: LoadResult
) -> None:
    async with open_client(target) as client:
        await run_load(client, jobs, timeout_s=timeout_s, start=start, result=result)


def _print_minute(at: float, step_s: float, rss: int, results: Sequence[LoadResult]) -> None:
    since = max(0.0, at - step_s)  # an active request has end 0
    ended = [r for result in results for r in result.records if r.end > since]
    answered = [r for r in ended if r.error is None]
    first = [r.ttft_s * 1e3 for r in answered if r.ttft_s is not None]
    tokens = sum(r.output_tokens for r in answered)
    print(
        f"{at / 60:5.1f} min  {rss / 2**20:7.1f} MiB  {len(answered):4} answered  "
        f"{len(ended) - len(answered):3} failed  {tokens / step_s:6.1f} tokens/s  "
        f"first token P50 {percentile(first, 50):6.1f} ms, P99 {percentile(first, 99):6.1f} ms",
        flush=True,
    )
