"""What the serving cases share, and the cases that compare the server with the engine alone.

Each case starts its own server, with the options of the command line and its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.tools.bench.report import Measure
from jaxinfer.tools.bench.serve_cases.server import ReferenceEngine, Server, ServerError, running
from jaxinfer.tools.load_client.load import Client, Endpoint, load_endpoint, open_client, run_load
from jaxinfer.tools.load_client.record import LoadResult
from jaxinfer.tools.load_client.workload import Lengths, LoadJob, PromptMaker, make_jobs

CLIENTS = 16  # and rows of the engine
LENGTHS = Lengths("uniform", (16, 64)), Lengths("uniform", (64, 192))  # prompts, outputs
IDLE_TIMEOUT_S = 30.0  # for a server to notice that all clients have disconnected
ADDED_MS = 10.0
WARM_UP_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class CaseOptions:
    """The options of a case; `requests`, `repeats` and `minutes` set its size."""

    model: str
    preset: str | None
    settings: Sequence[str]
    requests: int | None
    repeats: int
    minutes: float
    rate: float
    vocab_size: int
    seed: int
    timeout_s: float

    def count(self, usual: int) -> int:
        return usual if self.requests is None else self.requests

    def prompts(self, *path: int) -> PromptMaker:
        """Prompts that share no prefix with those of any other `path`."""
        number = self.seed
        for part in path:
            number = number * 1009 + part + 1
        return PromptMaker(number, self.vocab_size)

    def server(self, *settings: str) -> Server:
        """Start a server with these options and the case's own."""
        settings = (*self.settings, f"scheduler.max_num_seqs={CLIENTS}", *settings)
        return Server(self.model, self.preset, settings, _log("server"))

    def reference(self) -> ReferenceEngine:
        """Start the engine alone, with the same options."""
        settings = (*self.settings, f"scheduler.max_num_seqs={CLIENTS}")
        return ReferenceEngine(self.model, self.preset, settings, _log("reference"))


def _log(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix="bench_serve-")) / f"{name}.log"


def endpoints(server: Server, **fields: object) -> dict[str, Endpoint]:
    """Both endpoints, with greedy sampling and answers of full length."""
    fields = {"temperature": 0, "ignore_eos": True} | fields
    return {
        "HTTP": Endpoint("completions", server.http, server.model, fields=fields),
        "gRPC": Endpoint("grpc", server.grpc, fields=fields),
    }


def require_answers(result: LoadResult) -> LoadResult:
    """Return the result; raises `ServerError` where a request has no complete answer."""
    for record in result.records:
        if record.error is not None:
            raise ServerError(f"request {record.index}: {record.error}: {record.detail}")
    return result


def throughput(options: CaseOptions) -> list[Measure]:
    """Tokens a second of 16 streaming clients, against `LLM.generate` with the same work.

    A round is the reference, then HTTP, then gRPC: same lengths, fresh prompts.
    """
    rates: dict[str, list[float]] = {"LLM.generate": [], "HTTP": [], "gRPC": []}
    shares: list[float] = []
    count = options.count(64)
    reference = options.reference()
    with running(reference):
        server = options.server()
        with running(server):
            for round_index in range(options.repeats + 1):
                number = min(count, 2 * CLIENTS) if round_index == 0 else count
                jobs = [
                    make_jobs(
                        options.prompts(round_index, side), *LENGTHS, [None] * number, round_index
                    )
                    for side in range(3)
                ]
                lens = [job.max_tokens for job in jobs[0]]
                seconds = reference.generate([job.prompt for job in jobs[0]], lens)
                found = {"LLM.generate": sum(lens) / seconds}
                for (name, target), work in zip(endpoints(server).items(), jobs[1:], strict=True):
                    load = load_endpoint(target, work, timeout_s=options.timeout_s, clients=CLIENTS)
                    result = require_answers(asyncio.run(load))
                    found[name] = result.tokens_per_s
                    shares += result.cpu_shares
                if round_index > 0:  # the first round warms both up
                    for name, rate in found.items():
                        rates[name].append(rate)
    print(f"throughput: the client took {statistics.median(shares):.1%} of a core")
    other = rates["LLM.generate"], "LLM.generate"
    return [
        Measure("throughput, HTTP", "tokens/s", rates["HTTP"], *other, 0.90),
        Measure("throughput, gRPC", "tokens/s", rates["gRPC"], *other, 0.95),
    ]


def first_token(options: CaseOptions) -> list[Measure]:
    """The latency that the service adds to the first token of an idle engine; sides alternate."""
    times: dict[str, list[float]] = {"engine": [], "HTTP": [], "gRPC": []}
    reference = options.reference()

    async def rounds(server: Server) -> None:
        targets = endpoints(server)
        async with open_client(targets["HTTP"], 1) as http, open_client(targets["gRPC"], 1) as grpc:
            clients = {"HTTP": http, "gRPC": grpc}
            for round_index in range(WARM_UP_ROUNDS + options.count(60)):
                prompts = [options.prompts(round_index).make(side, 32) for side in range(3)]
                found = {"engine": await asyncio.to_thread(reference.first_token, prompts[0])}
                for (name, client), prompt in zip(clients.items(), prompts[1:], strict=True):
                    found[name] = await _first_token(client, prompt, options.timeout_s)
                if round_index >= WARM_UP_ROUNDS:
                    for name, seconds in found.items():
                        times[name].append(seconds * 1e3)

    with running(reference):
        server = options.server()
        with running(server):
            asyncio.run(rounds(server))
    own = statistics.median(times["engine"])
    measures = [Measure("first_token, engine", "ms", times["engine"], bound="at most")]
    for name in ("HTTP", "gRPC"):
        added = [time_ms - own for time_ms in times[name]]
        measures.append(
            Measure(f"first_token, {name} adds", "ms", added, target=ADDED_MS, bound="at most")
        )
    return measures


async def _first_token(client: Client, prompt: str | list[int], timeout_s: float) -> float:
    """Measure the seconds to the first text of an idle server."""
    load = run_load(client, [LoadJob(prompt, 4)], timeout_s=timeout_s, clients=1)
    [record] = require_answers(await load).records
    await asyncio.sleep(0.02)  # the engine's last, surplus step
    if record.ttft_s is None:
        raise ServerError("an answer of 4 tokens had no text; choose another --seed")
    return record.ttft_s


def wait_until_idle(server: Server) -> dict[str, float]:
    """The server's metrics once it is idle, or after `IDLE_TIMEOUT_S`."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        metrics = server.metrics()
        busy = metrics["jaxinfer_requests_in_flight"] + metrics['jaxinfer_pages{state="owned"}']
        if busy == 0 or time.monotonic() > deadline:
            return metrics
        time.sleep(0.1)
