"""Offline speed compared with Hugging Face transformers, in one run on one machine.

    jaxinfer bench offline --model=demo --dtype=float32 --json=out.json

Both sides load the same file, get the same prompts and the same cores, and alternate: one round of
each, `--repeats` times, after a round that is not counted. Prompts are new in every round, so that
no prefix is ever found in a cache. The ratio compares medians; the best of each is printed next to
it, because a busy machine slows single rounds. The peer runs a hand-written decode loop, which is
faster than its own `model.generate` (see `tools/bench/peer.py`).

Cases (`--cases`, comma-separated):

    one_stream  tokens/s of one greedy stream, after its first token
    rows        the same for 8 rows together
    prefill     tokens/s of a prompt of 512 tokens, up to its first token
    mixed       useful tokens/s over 64 requests (prompts of 8-256 tokens, heavy-tailed outputs of
                8-256) against the peer, and this engine itself, in static batches of 16
    host        host work in a step of 256 decoding rows, one layer, a small vocabulary; with its
                profile; and with the whole vocabulary
    pool        step time with ten times the pages
    startup     seconds to the first token of the demo in a new process, compilation cache empty
                and full
    programs    programs that the demo compiles, and how many of them after its warm-up

Run it on a quiet machine. The share that other processes take is measured, and reported where it
invalidates a case.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from jaxinfer import LLM, load_config
from jaxinfer.execution.host_tuning import tune_gc
from jaxinfer.loading.demo import demo_model_path
from jaxinfer.tools.bench import engine as bench_engine
from jaxinfer.tools.bench.report import Measure, OtherLoad, machine, print_table

# The minimum ratio (the maximum, for "at most") that a case must reach, by dtype.
TARGETS = {
    "one_stream": {"float32": 1.3, "bfloat16": 1.0},
    "rows": {"float32": 1.3, "bfloat16": 1.0},
    "prefill": {"float32": 1.0, "bfloat16": None},
    "mixed": {"float32": 2.0, "bfloat16": 1.0},
}
STATIC_ROWS = 16
HOST_VOCAB = 2048


class OfflineBench:
    """The two sides, loaded once and timed alternately."""

    def __init__(
        self,
        model: str,
        dtype: str,
        *,
        preset: str | None,
        settings: Sequence[str],
        peer: str,
        threads: int,
        repeats: int,
    ):
        self.dtype, self.repeats, self.threads = dtype, repeats, threads
        self.settings = [f"dtype={dtype}", *settings]
        [self.engine] = LLM(model, load_config(preset, self.settings)).engine.replicas
        self.vocab_size = self.engine.model.config.vocab_size
        self.peer: Any = None
        if peer == "transformers":
            from jaxinfer.tools.bench.peer import (
                TransformersPeer,  # here, so that --peer=none needs no PyTorch
            )

            path = demo_model_path() if model == "demo" else model
            self.peer = TransformersPeer(path, dtype, threads)
        self.profile: list[tuple[str, float, float]] = []
        self._num_prompts = 0

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Random prompts of the given lengths, all different, and the same in every run."""
        self._num_prompts += 1
        generator = np.random.default_rng([self._num_prompts, 2])
        return [generator.integers(100, self.vocab_size, n).tolist() for n in lengths]

    def alternate(self, work: Callable[[], list[float]]) -> list[list[float]]:
        """Run `work`, which returns one sample a side, for every round; return the samples by
        side."""
        work()
        return [list(side) for side in zip(*(work() for _ in range(self.repeats)), strict=True)]

    def decode(self, case: str, num_rows: int, num_tokens: int = 64) -> Measure:
        """Tokens a second of `num_rows` streams of 16 prompt tokens, after their first tokens."""
        count = num_rows * (num_tokens - 1)

        def work() -> list[float]:
            prompts = self.prompts([16] * num_rows)
            ours = bench_engine.run_prompts(self.engine, prompts, [num_tokens] * num_rows)
            samples = [count / ours.decode_s]
            if self.peer:
                samples.append(count / self.peer.generate(prompts, num_tokens).decode_s)
            return samples

        return self._versus_peer(case, "tokens/s", self.alternate(work))

    def _versus_peer(self, case: str, unit: str, sides: list[list[float]]) -> Measure:
        ours, other = sides[0], sides[1] if len(sides) > 1 else []
        name = "transformers" if other else ""
        target = TARGETS[case.split()[0]][self.dtype] if other else None
        return Measure(case, unit, ours, other, name, target)


def one_stream(bench: OfflineBench) -> list[Measure]:
    """One request alone."""
    return [bench.decode("one_stream", 1)]


def rows(bench: OfflineBench) -> list[Measure]:
    """Eight requests together."""
    return [bench.decode("rows", 8)]


def prefill(bench: OfflineBench, num_tokens: int = 512) -> list[Measure]:
    """One prompt up to its first token."""

    def work() -> list[float]:
        prompts = bench.prompts([num_tokens])
        samples = [num_tokens / bench_engine.run_prompts(bench.engine, prompts, [1]).total_s]
        if bench.peer:
            samples.append(num_tokens / bench.peer.prefill(prompts[0]))
        return samples

    return [bench._versus_peer("prefill", "tokens/s", bench.alternate(work))]


def mixed_lengths(num_requests: int) -> tuple[list[int], list[int]]:
    """Prompt lengths uniform in 8-256 and output lengths log-normal (median 32), cut to 8-256.

    Three quarters of the outputs are shorter than 64 tokens and a few come near 256.
    """
    generator = np.random.default_rng(2)
    prompt_lens = generator.integers(8, 257, num_requests)
    output_lens = np.exp(generator.normal(np.log(32), 1.0, num_requests)).clip(8, 256).astype(int)
    return prompt_lens.tolist(), output_lens.tolist()


def mixed(bench: OfflineBench, num_requests: int = 64) -> list[Measure]:
    """Requests of very different lengths: continuous batching against static batches."""
    prompt_lens, output_lens = mixed_lengths(num_requests)
    static = bench_engine.engine_sharing_weights(
        bench.engine,
        bench_engine.with_scheduler(bench.engine.config, policy="static", max_num_seqs=STATIC_ROWS),
    )
    narrow = bench_engine.engine_sharing_weights(
        bench.engine, bench_engine.with_scheduler(bench.engine.config, max_num_seqs=STATIC_ROWS)
    )

    def work() -> list[float]:
        prompts = bench.prompts(prompt_lens)
        engines = (bench.engine, static, narrow)
        seconds = [
            bench_engine.run_prompts(engine, prompts, output_lens).total_s for engine in engines
        ]
        if bench.peer:
            seconds.append(bench.peer.serve_static(prompts, output_lens, STATIC_ROWS))
        return [sum(output_lens) / s for s in seconds]

    ours, itself, same_rows, *peer = bench.alternate(work)
    static_name = f"itself, static {STATIC_ROWS}"
    target = TARGETS["mixed"][bench.dtype]
    return [
        bench._versus_peer("mixed", "tokens/s", [ours, *peer]),
        Measure("mixed", "tokens/s", ours, itself, static_name, target),
        Measure(f"mixed, {STATIC_ROWS} rows", "tokens/s", same_rows, itself, static_name),
    ]


def host(bench: OfflineBench, num_rows: int = 256, num_steps: int = 40) -> list[Measure]:
    """The host's work in a step of many decoding rows, with and without streamed text."""
    measures = []
    tune_gc()  # as the server does
    whole = bench.vocab_size
    for vocab_size, with_text in ((HOST_VOCAB, True), (HOST_VOCAB, False), (whole, True)):
        engine = bench_engine.one_layer_engine(
            bench.engine,
            num_rows,
            16 + 2 * num_steps + 8,
            vocab_size=vocab_size,
            with_text=with_text,
        )
        prompts = [[i % vocab_size for i in p] for p in bench.prompts([16] * num_rows)]
        work = bench_engine.host_work(engine, prompts, num_steps)
        name = f"host, {num_rows} rows" + ("" if with_text else ", ids only")
        name += f", {whole} tokens" if vocab_size == whole else ""
        samples = [s * 1e3 for s in work.step_s]
        target = 1.5 if vocab_size == HOST_VOCAB else None
        measures.append(Measure(name, "ms a step", samples, [], "", target, "at most"))
        bench.profile = bench.profile or work.profile
    return measures


def pool(bench: OfflineBench, num_rows: int = 8, num_pages: int = 24) -> list[Measure]:
    """Step time with `num_pages` and ten times as many: is the cache updated in place?"""
    small, large = (
        bench_engine.engine_sharing_weights(
            bench.engine, bench_engine.with_pages(bench.engine.config, n)
        )
        for n in (num_pages, 10 * num_pages)
    )

    def work() -> list[float]:
        prompts = bench.prompts([16] * num_rows)
        steps = (bench_engine.step_seconds(e, prompts, 20) for e in (large, small))
        return [statistics.median(s) * 1e3 for s in steps]

    large_ms, small_ms = bench.alternate(work)
    other = f"{num_pages} pages"
    return [Measure("pool, 10x pages", "ms a step", large_ms, small_ms, other, 1.05, "at most")]


def first_token_seconds(command: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds from starting `command` to the first byte on its standard output; runs to its end."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - start
    process.communicate()
    if process.returncode or not first:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} and no output")
    return seconds


def startup(bench: OfflineBench) -> list[Measure]:
    """The time of `make run` to its first token with an empty, then a full compilation cache."""
    command = [
        sys.executable,
        "-m",
        "jaxinfer",
        "generate",
        "--model=demo",
        "--config=demo",
        "--temperature=0",
    ]
    command += ["--apply_chat_template", "--prompt=Why is the sky blue?", "--max_tokens=8"]
    cold, warm = [], []
    for _ in range(min(bench.repeats, 3)):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "jaxinfer"
            home.mkdir()
            (home / "models").symlink_to(demo_model_path().parent)
            environment = os.environ | {"XDG_CACHE_HOME": folder}
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
            cold.append(first_token_seconds(command, environment))
            warm.append(first_token_seconds(command, environment))
    return [
        Measure("startup, cold", "s", cold, target=30, bound="at most"),
        Measure("startup, warm", "s", warm, target=10, bound="at most"),
    ]


def programs(bench: OfflineBench) -> list[Measure]:
    """Programs of the demo's engine after answers of many lengths, alone and together."""
    engine = bench_engine.engine_sharing_weights(bench.engine, load_config("demo"))
    engine.warm_up()
    for lengths in ([1], [3], [40], [200, 7, 90], [300] * 20):
        bench_engine.run_prompts(engine, bench.prompts(lengths), [4] * len(lengths))
    runner = engine.runner
    late = [float(runner.num_late_compiles)]
    return [
        Measure("programs", "compiled", [float(runner.num_compiled)], target=8, bound="at most"),
        Measure("programs", "after warm-up", late, target=0, bound="at most"),
    ]


def versions(bench: OfflineBench) -> dict[str, str]:
    """Versions of the measured packages."""
    names = ("jaxinfer", "jax", "jaxlib", "flax", "numpy")
    found = {"python": platform.python_version()} | {n: metadata.version(n) for n in names}
    return found | (bench.peer.versions() if bench.peer else {})


def restrict_to(threads: int) -> None:
    """Restrict this process, and so both sides' thread pools, to `threads` of its cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise app.UsageError(f"--threads={threads}, but this process may use {len(allowed)} cores")
    os.sched_setaffinity(0, allowed[:threads])


CASES: dict[str, Callable[[OfflineBench], list[Measure]]] = {
    "one_stream": one_stream,
    "rows": rows,
    "prefill": prefill,
    "mixed": mixed,
    "host": host,
    "pool": pool,
    "startup": startup,
    "programs": programs,
}

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "demo", 'GGUF file, Hugging Face directory, or "demo".')
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Number type of both sides.")
flags.DEFINE_enum("peer", "transformers", ["transformers", "none"], "What to compare with.")
flags.DEFINE_list("cases", list(CASES), f"Cases to run, of {', '.join(CASES)}.")
flags.DEFINE_integer(
    "threads", len(os.sched_getaffinity(0)), "Cores, the same for both sides.", lower_bound=1
)
flags.DEFINE_integer("repeats", 5, "Counted rounds of a case.", lower_bound=1)
flags.DEFINE_string("config", None, "Preset or .toml file of engine options.")
flags.DEFINE_multi_string("set", [], "Engine options, key.path=value.")
flags.DEFINE_string("json", None, "File to write the results into.")


def main(argv: Sequence[str]) -> None:
    """Run the cases, print the table, write the JSON."""
    unknown = [case for case in FLAGS.cases if case not in CASES]
    if unknown or len(argv) > 1:
        raise app.UsageError(f"unknown: {unknown or argv[1:]}; cases are {', '.join(CASES)}")
    restrict_to(FLAGS.threads)
    bench = OfflineBench(
        FLAGS.model,
        FLAGS.dtype,
        preset=FLAGS.config,
        settings=FLAGS.set,
        peer=FLAGS.peer,
        threads=FLAGS.threads,
        repeats=FLAGS.repeats,
    )
    measures: list[Measure] = []
    other_load = OtherLoad()
    for name, case in CASES.items():
        if name in FLAGS.cases:
            print(f"{name} ...", file=sys.stderr, flush=True)
            with other_load.watch(name):
                measures += case(bench)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(bench.threads),
        "versions": versions(bench),
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "config": FLAGS.config,
        "settings": bench.settings,
        "measures": [measure.as_json() for measure in measures],
        "host_profile": bench.profile,
        "other_load": other_load.shares,
    }
    about = result["machine"]
    print(f"{about['cpu']}, {FLAGS.threads} of {about['cores']} cores, {FLAGS.dtype}")
    print(f"{result['date']}, " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print_table(measures)
    other_load.print_warnings()
    if bench.profile:
        print("\nhost work by function, microseconds a step, under the profiler:")
        for where, calls, micros in bench.profile:
            print(f"  {micros:9.1f}  {calls:8.1f} calls  {where}")
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    app.run(main)
