"""Run and measure a jaxinfer engine for the benchmarks.

All functions use `Engine.add` and `Engine.step`, the loop that `LLM` and the server run.
"""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.bench.report import TimedRun

Prompts = Sequence[Sequence[int]]


def run_prompts(engine: Engine, prompts: Prompts, output_lens: Sequence[int]) -> TimedRun:
    """Generate `output_lens` greedy tokens for the prompts, which are added at once to an idle
    engine."""
    start = first = time.perf_counter()
    requests = [
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))[0]
        for prompt, n in zip(prompts, output_lens, strict=True)
    ]
    unanswered = {request.id for request in requests}
    while engine.has_requests:
        for update in engine.step():
            if update.token_ids and update.request.id in unanswered:
                unanswered.discard(update.request.id)
                first = time.perf_counter()
    end = time.perf_counter()
    return TimedRun([r.output_token_ids for r in requests], first - start, end - first)


def engine_sharing_weights(
    engine: Engine, config: EngineConfig, *, with_text: bool = True
) -> Engine:
    """Another engine over the same weights; it compiles its programs at their first use."""
    return Engine(
        engine.model,
        engine.runner.weights,
        config,
        tokenizer=engine.tokenizer if with_text else None,
        eos_token_ids=sorted(engine.eos_token_ids),
        name=engine.name,
    )


def with_scheduler(config: EngineConfig, **changes) -> EngineConfig:
    """`config` with fields of `config.scheduler` replaced."""
    scheduler = dataclasses.replace(config.scheduler, **changes)
    return dataclasses.replace(config, scheduler=scheduler)


def with_pages(config: EngineConfig, num_pages: int) -> EngineConfig:
    """`config` with a pool of `num_pages` pages and no prefix cache."""
    cache = dataclasses.replace(config.cache, num_pages=num_pages, prefix_cache=False)
    return dataclasses.replace(config, cache=cache)


def one_layer_engine(
    engine: Engine, num_rows: int, num_tokens: int, *, vocab_size: int, with_text: bool
) -> Engine:
    """An engine for the same model cut to one layer of random weights, `num_rows` slots.

    A small vocabulary keeps the device's work small: on a CPU, reading 256 rows of 49,152 logits
    evicts the host's data from the caches that it shares with the device. The pool holds every row
    at `num_tokens` tokens. Overlap is off, so that host and device work alternately and their times
    add up to that of the step.
    """
    config = dataclasses.replace(engine.model.config, num_layers=1, vocab_size=vocab_size)
    model = FunctionalModel(engine.model.family, config, engine.model.numerics)
    generator = np.random.default_rng(0)
    weights = tuple(
        jax.device_put(generator.standard_normal(p.shape, np.float32).astype(p.dtype) * 0.02)
        for p in model.parameters
    )
    page_size = engine.config.cache.page_size
    pages = num_rows * -(-num_tokens // page_size)
    settings = with_scheduler(
        with_pages(engine.config, pages), max_num_seqs=num_rows, max_tokens=512
    )
    settings = dataclasses.replace(settings, overlap=False)
    tokenizer = engine.tokenizer if with_text else None
    return Engine(model, weights, settings, tokenizer=tokenizer, name="one layer")


@dataclasses.dataclass(frozen=True)
class HostWork:
    """The host's seconds in each pure decode step, and a profile by function.

    They are wall time minus the time blocked on the device, and include interference of everything
    else on the machine, such as the device's threads on a CPU.
    """

    step_s: list[float]
    profile: list[tuple[str, float, float]]  # function, calls a step, microseconds a step


def host_work(engine: Engine, prompts: Prompts, num_steps: int) -> HostWork:
    """Measure the host's part of steps that decode one token for every prompt.

    `num_steps` are timed; half as many more run under cProfile, which slows them, and are not
    timed.
    """
    output_len = 2 * num_steps + 4
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for prompt in prompts:
        engine.add(prompt, params)
    for _ in range(
        4 + len(prompts) * len(prompts[0]) // engine.config.scheduler.max_num_batched_tokens
    ):
        engine.step()
    work = HostWork([], [])
    for _ in range(num_steps):
        engine.step()
        if engine.stats.last_step.num_rows == engine.stats.last_step.num_tokens == len(prompts):
            work.step_s.append(engine.stats.last_step.total_s - engine.stats.last_step.wait_s)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps // 2):
        engine.step()
    profiler.disable()
    while engine.has_requests:
        engine.step()
    if len(work.step_s) < num_steps:
        raise RuntimeError(
            f"{num_steps - len(work.step_s)} of {num_steps} steps did not decode all "
            f"{len(prompts)} rows; raise the pool or the budget"
        )
    return dataclasses.replace(work, profile=_top_functions(profiler, num_steps // 2))


def _top_functions(
    profiler: cProfile.Profile, num_steps: int, count: int = 12
) -> list[tuple[str, float, float]]:
    """The functions with the most self time, waiting for the device left out."""
    rows = []
    for (file, line, name), (_, calls, own, *_) in pstats.Stats(profiler).stats.items():  # type: ignore
        where = f"{file.rsplit('/', 1)[-1]}:{line}:{name}" if line else name
        rows.append((where, calls / num_steps, own / num_steps * 1e6))
    rows.sort(key=lambda row: -row[2])
    return rows[:count]


def step_seconds(engine: Engine, prompts: Prompts, num_steps: int) -> list[float]:
    """Wall time of each step that decodes one token for every prompt; the engine is idle
    afterwards."""
    for prompt in prompts:
        params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
        engine.add(prompt, params)
    times = []
    while engine.has_requests:
        engine.step()
        if engine.stats.last_step.num_rows == engine.stats.last_step.num_tokens == len(prompts):
            times.append(engine.stats.last_step.total_s)
    return times
