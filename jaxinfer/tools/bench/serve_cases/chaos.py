"""The serving case `chaos`: requests that end in every way a client can end them.

Each request does one of `ACTIONS`, drawn by the seed, over one of the endpoints. What may come of
it is known beforehand; anything else counts as a surprise. Afterwards nothing of all this may be
left in the server: it runs with `check_every_step`, so it would have died had a page been lost on
the way.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.tools.bench.report import Measure
from jaxinfer.tools.bench.serve_cases.latency import CaseOptions, endpoints, wait_until_idle
from jaxinfer.tools.bench.serve_cases.server import Server, running
from jaxinfer.tools.load_client.http import HttpClient
from jaxinfer.tools.load_client.load import Client, Endpoint, open_client, send_one
from jaxinfer.tools.load_client.record import Record
from jaxinfer.tools.load_client.workload import LoadJob

CLIENTS = 48
# The server's idle threads end after some time without load.
QUIET_S = 45.0

# What a request does, how often, and the errors (the client's kinds, over HTTP and gRPC) that may
# result besides an answer and a refusal for lack of capacity.
REFUSED = {"HTTP 429", "RESOURCE_EXHAUSTED"}
LATE = {"HTTP 408", "in the stream: timeout_error", "DEADLINE_EXCEEDED"}
ACTIONS: Mapping[str, tuple[float, set[str]]] = {
    "wait for it": (0.3, set()),
    "leave": (0.25, {"left"}),
    "leave at once": (0.1, {"left"}),
    "deadline": (0.15, LATE),
    "do not read": (0.05, {"left"}),
    "half a request": (0.05, {"left"}),
    "wrong": (0.1, {"HTTP 400", "INVALID_ARGUMENT"}),
}


@dataclasses.dataclass(frozen=True)
class FaultyRequest:
    """One request of the case, and how its client misbehaves."""

    action: str
    job: LoadJob
    after_s: float  # when a leaving client disconnects
    fields: Mapping[str, Any]


def draw_faulty_requests(options: CaseOptions, count: int, seed: int) -> list[FaultyRequest]:
    """Draw `count` requests, the same for the same seed."""
    generator = np.random.default_rng([seed, 4])
    names = list(ACTIONS)
    weights = [ACTIONS[name][0] for name in names]
    prompts = options.prompts(seed)
    requests = []
    for index, choice in enumerate(generator.choice(len(names), count, p=weights)):
        prompt = prompts.make(index, int(generator.integers(1, 200)))
        job = LoadJob(prompt, int(np.exp(generator.normal(np.log(16), 1)).clip(1, 200)))
        fields: dict[str, Any] = {"temperature": float(generator.choice([0.0, 0.7, 1.3]))}
        if generator.random() < 0.3:
            fields |= {"seed": int(generator.integers(1, 2**31)), "top_p": 0.9}
        if generator.random() < 0.2:
            fields["n"] = int(generator.integers(2, 4))
            fields["temperature"] = 1.0
        if names[choice] == "deadline":
            fields["timeout_s"] = float(generator.exponential(0.5))
        elif names[choice] == "wrong":
            fields |= {"temperature": -1.0} if generator.random() < 0.5 else {"top_p": 7.0}
        after_s = float(generator.exponential(0.7))
        requests.append(FaultyRequest(names[choice], job, after_s, fields))
    return requests


async def send_faulty(
    client: Client, target: Endpoint, request: FaultyRequest, timeout_s: float
) -> str | None:
    """Send the request; return the kind of error that resulted, or None for a complete answer."""
    start = time.monotonic()
    record = Record(0, 0.0)
    clock = lambda: time.monotonic() - start
    is_http = isinstance(client, HttpClient)
    if is_http and request.action in ("do not read", "half a request"):
        return await _unread(client, target, request)
    fields = dict(request.fields)
    if not is_http and request.action == "deadline" and request.job.max_tokens % 2:
        fields["deadline_s"] = fields.pop("timeout_s")  # the call's own, as often as the field
    task = asyncio.create_task(send_one(client, request.job, record, clock, timeout_s, fields))
    if request.action in ("leave", "leave at once", "do not read", "half a request"):
        wait_s = 0.0 if request.action == "leave at once" else request.after_s
        await asyncio.wait([task], timeout=wait_s)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return "left"
    await task
    return record.error


async def _unread(client: HttpClient, target: Endpoint, request: FaultyRequest) -> str:
    """Send a request, or half of it, and close the connection without reading."""
    data = client.request("POST", None, client.body(request.job, request.fields))
    host, _, port = target.address.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(data if request.action == "do not read" else data[: len(data) // 2])
    await asyncio.sleep(request.after_s)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return "left"


async def send_all_faulty(
    server: Server, options: CaseOptions, requests: list[FaultyRequest]
) -> list[str]:
    """Send all requests over both endpoints alternately; return the unexpected outcomes."""
    surprises: list[str] = []
    outcomes: collections.Counter[str] = collections.Counter()
    targets = list(endpoints(server, ignore_eos=False).values())
    async with open_client(targets[0]) as http, open_client(targets[1]) as grpc:
        queue = enumerate(requests)

        async def work() -> None:
            for index, request in queue:
                side = index % 2
                client, target = (http, grpc)[side], targets[side]
                error = await send_faulty(client, target, request, options.timeout_s)
                outcomes[error or "answered"] += 1
                if error is None and request.action != "wrong":
                    continue
                if error not in ACTIONS[request.action][1] | REFUSED:
                    surprises.append(f"{request.action}: {error or 'answered'} ({target.api})")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(work())
    print("chaos: " + ", ".join(f"{count} {name}" for name, count in outcomes.most_common()))
    return surprises


def chaos(options: CaseOptions) -> list[Measure]:
    """Send random requests that are cancelled, cut, late or wrong; the server must free all of
    their resources."""
    count = options.count(2000)
    server = options.server("check_every_step=true")
    with running(server):
        warm_up = draw_faulty_requests(options, max(2 * CLIENTS, count // 10), options.seed + 1)
        asyncio.run(send_all_faulty(server, options, warm_up))
        before = _left(server, None)
        start = time.monotonic()
        surprises = asyncio.run(
            send_all_faulty(server, options, draw_faulty_requests(options, count, options.seed))
        )
        print(f"chaos: {count} requests in {time.monotonic() - start:.1f} s")
        after = _left(server, before)
    for text, number in collections.Counter(surprises).most_common(10):
        print(f"chaos, a surprise, {number} times: {text}")
    measures = [("surprises", "requests", float(len(surprises)), 0.0)]
    measures += [
        (name, "left", value, 0.0 if name in ("in flight", "pages owned") else before[name])
        for name, value in after.items()
    ]
    return [
        Measure(f"chaos: {name}", unit, [value], target=target, bound="at most")
        for name, unit, value, target in measures
    ]


def _left(server: Server, before: Mapping[str, float] | None) -> dict[str, float]:
    """The server's resources in use once it is idle; waits up to `QUIET_S` for no more than
    `before`."""
    deadline = time.monotonic() + QUIET_S
    while True:
        metrics = wait_until_idle(server)
        pages = {s: metrics[f'jaxinfer_pages{{state="{s}"}}'] for s in ("free", "cached", "owned")}
        left = {
            "in flight": metrics["jaxinfer_requests_in_flight"],
            "pages owned": pages["owned"],
            "pages in all": pages["free"] + pages["cached"] + pages["owned"],
            "threads": float(server.num_threads),
            "open files": float(server.num_files),
        }
        is_less = before is not None and all(left[name] <= before[name] for name in left)
        if is_less or time.monotonic() > deadline:
            return left
        time.sleep(0.5)
