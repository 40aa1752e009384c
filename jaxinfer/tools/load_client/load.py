"""Send a load and record the answers: open or closed loop, in one process or several.

Open loop: every request is sent at its time, whether or not earlier ones have been answered, as
independent users would; a slow server then faces a growing queue instead of a waiting client.
Closed loop: N clients, each of which sends its next request when its last one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jaxinfer.tools.load_client.http import Clock, HttpClient, RequestFailed
from jaxinfer.tools.load_client.record import LoadResult, Record
from jaxinfer.tools.load_client.workload import LoadJob

PROBE_S = 0.05  # between two measurements of the event loop's delay


class Client(Protocol):
    """A client of one endpoint of a server."""

    async def open(self, count: int) -> None: ...

    async def send(
        self, job: LoadJob, record: Record, clock: Clock, fields: Mapping[str, Any] | None = None
    ) -> None: ...

    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The endpoint that receives a load; plain data, so that every client process can connect.

    `fields` are added to every request: to the JSON of the HTTP body, or to the gRPC message.
    """

    api: str  # "completions", "chat", "grpc", or "frames": gRPC by load_client.frames
    address: str  # a URL, or host:port for gRPC
    model: str = ""
    api_key: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def client(self) -> Client:
        """Make a client for the running event loop."""
        common: dict[str, Any] = {
            "model": self.model,
            "api_key": self.api_key,
            "fields": self.fields,
        }
        if self.api == "grpc":
            from jaxinfer.tools.load_client.grpc import (
                GrpcClient,
            )  # imported here, since HTTP does not need it

            return GrpcClient(self.address, **common)
        if self.api == "frames":
            from jaxinfer.tools.load_client.frames import FrameClient

            return FrameClient(self.address, **common)
        return HttpClient(self.address, self.api, **common)


@contextlib.asynccontextmanager
async def open_client(target: Endpoint, connections: int = 0) -> AsyncIterator[Client]:
    """Open a client with `connections` connections ready."""
    client = target.client()
    try:
        if connections:
            await client.open(connections)
        yield client
    finally:
        await client.close()


async def send_one(
    client: Client,
    job: LoadJob,
    record: Record,
    clock: Clock,
    timeout_s: float,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Send a job; an error is recorded, not raised."""
    record.sent = clock()
    try:
        async with asyncio.timeout(timeout_s):
            await client.send(job, record, clock, fields)
    except TimeoutError:
        record.error, record.detail = "timeout", f"no complete answer in {timeout_s} s"
    except RequestFailed as failure:
        record.error, record.detail = failure.kind, failure.detail
    except OSError as error:
        record.error, record.detail = "disconnected", str(error)
    record.end = clock()


async def run_load(
    client: Client,
    jobs: Sequence[LoadJob],
    *,
    timeout_s: float,
    clients: int | None = None,
    start: float | None = None,
    indices: Sequence[int] | None = None,
    result: LoadResult | None = None,
) -> LoadResult:
    """Send all jobs and wait for all of them to end.

    The load is an open loop where `clients` is None; each job then has a time. `start` is a moment
    of `time.monotonic` (None: now); `indices` number the records (None: from 0). `result` is filled
    during the load, so that a caller can watch it.
    """
    start = time.monotonic() if start is None else start
    clock: Clock = lambda: time.monotonic() - start
    await asyncio.sleep(max(0.0, -clock()))
    cpu, began = time.process_time(), clock()
    result = LoadResult([], [], []) if result is None else result
    numbered = list(zip(range(len(jobs)) if indices is None else indices, jobs, strict=True))
    probe = asyncio.create_task(_watch_lag(result.lags_s))
    try:
        if clients is None:
            await _open_loop(client, numbered, clock, timeout_s, result.records)
        else:
            await _closed_loop(client, numbered, clock, timeout_s, result.records, clients)
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
    result.cpu_shares.append((time.process_time() - cpu) / max(clock() - began, 1e-9))
    return result


async def _open_loop(
    client: Client,
    jobs: Sequence[tuple[int, LoadJob]],
    clock: Clock,
    timeout_s: float,
    records: list[Record],
) -> None:
    async with asyncio.TaskGroup() as tasks:
        for index, job in jobs:
            at = job.at or 0.0
            if (wait := at - clock()) > 0:
                await asyncio.sleep(wait)
            records.append(Record(index, at))
            tasks.create_task(send_one(client, job, records[-1], clock, timeout_s))


async def _closed_loop(
    client: Client,
    jobs: Sequence[tuple[int, LoadJob]],
    clock: Clock,
    timeout_s: float,
    records: list[Record],
    clients: int,
) -> None:
    async def work(queue: Iterator[tuple[int, LoadJob]]) -> None:
        for index, job in queue:
            records.append(record := Record(index, clock()))
            await send_one(client, job, record, clock, timeout_s)

    queue = iter(jobs)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(work(queue))


async def _watch_lag(lags_s: list[float]) -> None:
    while True:
        due = time.monotonic() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lags_s.append(max(0.0, time.monotonic() - due))


async def load_endpoint(
    target: Endpoint, jobs: Sequence[LoadJob], *, timeout_s: float, clients: int | None = None
) -> LoadResult:
    """`run_load` with a new client; the connections of closed-loop clients are opened first."""
    async with open_client(target, clients or 0) as client:
        return await run_load(client, jobs, timeout_s=timeout_s, clients=clients)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The share of a load that one client process sends."""

    target: Endpoint
    jobs: Sequence[LoadJob]
    indices: Sequence[int]
    timeout_s: float
    clients: int | None


def load_in_processes(
    target: Endpoint,
    jobs: Sequence[LoadJob],
    *,
    timeout_s: float,
    clients: int | None = None,
    processes: int = 1,
) -> LoadResult:
    """`load_endpoint` with the jobs divided among several processes that start simultaneously."""
    if processes == 1:
        return asyncio.run(load_endpoint(target, jobs, timeout_s=timeout_s, clients=clients))
    context = multiprocessing.get_context("spawn")
    workers = []
    for i in range(processes):
        its_clients = None if clients is None else len(range(i, clients, processes))
        indices = range(i, len(jobs), processes)
        share = _Share(target, list(jobs[i::processes]), indices, timeout_s, its_clients)
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(share, theirs))
        worker.start()
        theirs.close()
        workers.append((worker, ours))
    try:
        for _, pipe in workers:
            pipe.recv()  # the worker is connected
        start = time.monotonic() + 0.1
        for _, pipe in workers:
            pipe.send(start)
        return LoadResult.merged(pipe.recv() for _, pipe in workers)
    finally:
        for worker, pipe in workers:
            pipe.close()
            worker.join(timeout=10)
            worker.kill()
            worker.join()


def _work(share: _Share, pipe: Any) -> None:
    pipe.send(asyncio.run(_work_share(share, pipe)))


async def _work_share(share: _Share, pipe: Any) -> LoadResult:
    async with open_client(share.target, share.clients or 0) as client:
        pipe.send("ready")
        return await run_load(
            client,
            share.jobs,
            timeout_s=share.timeout_s,
            clients=share.clients,
            start=pipe.recv(),
            indices=share.indices,
        )
