"""A load client for servers of language models, and this project's serving benchmark.

Against any OpenAI-compatible endpoint, or this project's gRPC:

    jaxinfer bench serve --url=http://127.0.0.1:8000 --api=chat --rate=2 --requests=200
    jaxinfer bench serve --grpc=127.0.0.1:9000 --arrivals=closed --clients=16 --prompts=ids
    jaxinfer bench serve --url=... --arrivals=trace --trace=load.jsonl --plot=load.png

Poisson arrivals and traces are open loop: requests are sent when they are due, answered or not.
Lengths are drawn from `--prompt_lens` and `--output_lens` (see `load_client.workload.Lengths`), all
by `--seed`. What is printed is said in `load_client/record.py`: latencies, goodput under
`--slo_ttft_ms` and `--slo_itl_ms`, errors by kind, and how late the client itself was.

The cases below start `jaxinfer serve` themselves (`--checkpoint`, `--config`, `--set`), state
what they must reach, and end with status 1 where they do not:

    throughput   tokens/s of 16 streaming clients over each endpoint, against `LLM.generate`
    first_token  what the service adds to the engine's own time to first token, idle
    overload     500 clients at once on a queue limit of 64: who is served, who refused, how fast
    chaos        2,000 requests cancelled, cut, late or wrong: nothing of them may be left
    soak         `--minutes` of steady load: resident memory

    jaxinfer bench serve --case=throughput,first_token --json=serve.json

Client and server share the machine in these: run them on a quiet one.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxinfer.tools.bench.report import Measure, OtherLoad, machine, print_table
from jaxinfer.tools.bench.serve_cases.chaos import chaos
from jaxinfer.tools.bench.serve_cases.latency import CaseOptions, first_token, throughput
from jaxinfer.tools.bench.serve_cases.stress import overload, soak
from jaxinfer.tools.load_client.http import HttpClient, RequestFailed
from jaxinfer.tools.load_client.load import Endpoint, load_in_processes
from jaxinfer.tools.load_client.plot import write_plot
from jaxinfer.tools.load_client.record import LoadResult, Slo, print_summary, summary
from jaxinfer.tools.load_client.workload import (
    Lengths,
    LoadJob,
    PromptMaker,
    WorkloadError,
    make_jobs,
    poisson_times,
    read_trace,
)

CASES: dict[str, Callable[[CaseOptions], list[Measure]]] = {
    "throughput": throughput,
    "first_token": first_token,
    "overload": overload,
    "chaos": chaos,
    "soak": soak,
}
USUAL_REQUESTS = 100

FLAGS = flags.FLAGS
flags.DEFINE_string("url", None, "Root of an OpenAI-compatible server; a /v1 at its end may stay.")
flags.DEFINE_string("grpc", None, "host:port of this project's gRPC endpoint.")
flags.DEFINE_enum("api", "completions", ["completions", "chat"], "What is called at --url.")
flags.DEFINE_string("model", None, "What the server calls its model; the first it lists, if unset.")
flags.DEFINE_string("api_key_file", None, "A file with the key to send.")
flags.DEFINE_string("fields", "{}", "A JSON object; its fields go into every request.")
flags.DEFINE_bool(
    "ignore_eos",
    False,
    "Send ignore_eos and temperature 0: every answer has its whole length. Not of OpenAI's API.",
)
flags.DEFINE_enum("arrivals", "poisson", ["poisson", "trace", "closed"], "When requests are sent.")
flags.DEFINE_float("rate", 1.0, "Requests a second: of Poisson arrivals, and of soak.", 1e-6)
flags.DEFINE_integer("clients", 16, "Concurrent clients of closed arrivals.", lower_bound=1)
flags.DEFINE_string("trace", None, "JSON lines: at, max_tokens, and prompt or prompt_tokens.")
flags.DEFINE_integer("requests", None, "How many; the case's or trace's own, if unset.", 1)
flags.DEFINE_enum("prompts", "text", ["text", "ids"], "Common words, or random token ids.")
flags.DEFINE_integer("vocab_size", 32000, "Token ids are below it.", lower_bound=101)
flags.DEFINE_string("prompt_lens", "lognormal:128:0.8:8:1024", "Lengths of prompts, in tokens.")
flags.DEFINE_string("output_lens", "lognormal:64:0.8:8:512", "The same of max_tokens.")
flags.DEFINE_integer("seed", 0, "Determines all random choices.", lower_bound=0)
flags.DEFINE_integer("warmup", 4, "Requests before the load that are not counted.", lower_bound=0)
flags.DEFINE_float("timeout_s", 300.0, "A request that takes longer has failed.", 1e-3)
flags.DEFINE_integer("processes", 1, "Client processes that share the load.", lower_bound=1)
flags.DEFINE_float("slo_ttft_ms", 1000.0, "Goodput: time to first token.", lower_bound=0)
flags.DEFINE_float("slo_itl_ms", 100.0, "Goodput: mean time a token after it.", lower_bound=0)
flags.DEFINE_string("json", None, "File to write the results into.")
flags.DEFINE_string("plot", None, "PNG file to draw the load into; needs matplotlib.")
flags.DEFINE_list("case", [], f"Cases to run instead, of {', '.join(CASES)}.")
flags.DEFINE_string("checkpoint", "demo", "Cases: the model that the server loads.")
flags.DEFINE_string("config", "demo", "Cases: preset or .toml file.")
flags.DEFINE_multi_string("set", [], "Cases: option, key.path=value.")
flags.DEFINE_integer("repeats", 3, "Cases: counted rounds of throughput and overload.", 1)
flags.DEFINE_float("minutes", 30.0, "Cases: how long soak lasts.", lower_bound=0.05)
HELP = {
    "Target": ("url", "grpc", "api", "model", "api_key_file"),
    "Load": ("arrivals", "rate", "clients", "requests", "prompt_lens", "output_lens", "trace"),
    "Results": ("slo_ttft_ms", "slo_itl_ms", "json", "plot"),
    "Cases of this project": ("case", "checkpoint", "config", "set", "repeats", "minutes"),
}


def target() -> Endpoint:
    """Where the load goes, by the flags."""
    if (FLAGS.url is None) == (FLAGS.grpc is None):
        raise app.UsageError("give --url or --grpc (one of them), or --case")
    try:
        fields = json.loads(FLAGS.fields)
    except ValueError as error:
        raise app.UsageError(f"--fields: {error}") from error
    if not isinstance(fields, dict):
        raise app.UsageError(f"--fields={FLAGS.fields}: it must be a JSON object")
    if FLAGS.ignore_eos:
        fields = {"ignore_eos": True, "temperature": 0} | fields
    key = FLAGS.api_key_file and Path(FLAGS.api_key_file).read_text("utf-8").strip()
    if FLAGS.grpc is not None:
        return Endpoint("grpc", FLAGS.grpc, FLAGS.model or "", key, fields)
    model = FLAGS.model or asyncio.run(first_model(FLAGS.url, key))
    return Endpoint(FLAGS.api, FLAGS.url, model, key, fields)


async def first_model(url: str, key: str | None) -> str:
    """The name of the first model that a server lists."""
    client = HttpClient(url, "completions", model="", api_key=key)
    try:
        return json.loads(await client.get("/v1/models"))["data"][0]["id"]
    except (OSError, RequestFailed, ValueError, LookupError, TypeError) as error:
        raise app.UsageError(f"{url} lists no model ({error}); name it with --model") from error
    finally:
        await client.close()


def jobs_to_send() -> list[LoadJob]:
    """The load, by the flags."""
    if (FLAGS.trace is not None) != (FLAGS.arrivals == "trace"):
        raise app.UsageError("--trace and --arrivals=trace belong together")
    if FLAGS.prompts == "ids" and FLAGS.url is not None and FLAGS.api == "chat":
        raise app.UsageError("--prompts=ids: a chat message is text; use --api=completions")
    prompts = PromptMaker(FLAGS.seed, FLAGS.vocab_size if FLAGS.prompts == "ids" else None)
    if FLAGS.trace is not None:
        return read_trace(FLAGS.trace, prompts)[: FLAGS.requests]
    count = FLAGS.requests or USUAL_REQUESTS
    times: list[float | None] = [None] * count
    if FLAGS.arrivals == "poisson":
        times = list(poisson_times(FLAGS.rate, count, FLAGS.seed))
    lengths = Lengths.parse(FLAGS.prompt_lens), Lengths.parse(FLAGS.output_lens)
    return make_jobs(prompts, *lengths, times, FLAGS.seed)


def warm_up_jobs() -> list[LoadJob]:
    """Short requests that no later one shares a prefix with."""
    prompts = PromptMaker(FLAGS.seed + 1, FLAGS.vocab_size if FLAGS.prompts == "ids" else None)
    return [LoadJob(prompts.make(i, 32), 16) for i in range(FLAGS.warmup)]


def load() -> dict[str, Any]:
    """Send the load, print what came of it, draw it."""
    where, jobs = target(), jobs_to_send()
    warm_up = load_in_processes(where, warm_up_jobs(), timeout_s=FLAGS.timeout_s, clients=4)
    failed = [record for record in warm_up.records if record.error is not None]
    if failed:
        print(f"warm-up: {failed[0].error}: {failed[0].detail}", file=sys.stderr)
    result: LoadResult = load_in_processes(
        where,
        jobs,
        timeout_s=FLAGS.timeout_s,
        clients=FLAGS.clients if FLAGS.arrivals == "closed" else None,
        processes=FLAGS.processes,
    )
    slo = Slo(FLAGS.slo_ttft_ms / 1e3, FLAGS.slo_itl_ms / 1e3)
    figures = summary(result, slo)
    print_summary(figures)
    if FLAGS.plot:
        write_plot(FLAGS.plot, result, slo, f"{where.api} at {where.address}")
    records = [vars(record) for record in result.records]
    return {"target": where.address, "api": where.api, "summary": figures, "records": records}


def run_cases() -> dict[str, Any]:
    """Run the cases and print their table."""
    options = CaseOptions(
        model=FLAGS.checkpoint,
        preset=FLAGS.config,
        settings=FLAGS.set,
        requests=FLAGS.requests,
        repeats=FLAGS.repeats,
        minutes=FLAGS.minutes,
        rate=FLAGS.rate,
        vocab_size=FLAGS.vocab_size,
        seed=FLAGS.seed,
        timeout_s=FLAGS.timeout_s,
    )
    measures: list[Measure] = []
    other_load = OtherLoad()
    for name, case in CASES.items():
        if name in FLAGS.case:
            print(f"{name} ...", file=sys.stderr, flush=True)
            with other_load.watch(name):
                measures += case(options)
    print_table(measures)
    other_load.print_warnings()
    return {
        "model": FLAGS.checkpoint,
        "config": FLAGS.config,
        "settings": FLAGS.set,
        "measures": [measure.as_json() for measure in measures],
        "is_reached": all(measure.is_reached is not False for measure in measures),
        "other_load": other_load.shares,
    }


def versions() -> dict[str, str]:
    """Versions of what decides the figures, as far as it is installed here."""
    found = {"python": platform.python_version()}
    for name in ("jaxinfer", "jax", "grpcio", "fastapi", "uvicorn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# What only a load uses, and what only the cases do.
LOAD_FLAGS = (
    *("api", "model", "api_key_file", "fields", "ignore_eos", "arrivals", "clients", "trace"),
    *("prompts", "prompt_lens", "output_lens", "warmup", "processes", "plot"),
    *("slo_ttft_ms", "slo_itl_ms"),
)
CASE_FLAGS = ("checkpoint", "config", "set", "repeats", "minutes")


def main(argv: Sequence[str]) -> None:
    """Send a load, or run cases; write the JSON."""
    unknown = [case for case in FLAGS.case if case not in CASES]
    if unknown or len(argv) > 1:
        raise app.UsageError(f"unknown: {unknown or argv[1:]}; cases are {', '.join(CASES)}")
    if FLAGS.case and (FLAGS.url or FLAGS.grpc):
        raise app.UsageError("--case starts a server of its own; leave out --url and --grpc")
    unused = LOAD_FLAGS if FLAGS.case else CASE_FLAGS
    if given := [f"--{name}" for name in unused if FLAGS[name].present]:
        where = "with --case, which sets it itself" if FLAGS.case else "without --case"
        raise app.UsageError(f"{', '.join(given)} has no effect {where}; leave it out")
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(len(os.sched_getaffinity(0))),
        "versions": versions(),
    }
    try:
        result |= run_cases() if FLAGS.case else load()
    except WorkloadError as error:
        raise app.UsageError(str(error)) from error
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if not result.get("is_reached", True):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
