"""Run the engine on the device with random weights: decode speed, time to the first token.

The floors follow from the rates that the device reached in this run: a decode step reads the
weights (an untied embedding only by its rows) and the cached tokens of every row once, at the copy
bandwidth; a prompt takes 2 FLOP a weight and token, and those of attention, at the bfloat16 rate.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.execution import compile as compiling
from jaxinfer.execution import kv_cache
from jaxinfer.execution.batch import build
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.models.decoder import DecoderConfig
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.compile_gate.matrix import load_matrix
from jaxinfer.tools.planner.models import model_from_table

MODEL = "llama3_8b"
TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
PAGE_SIZE = 64
CHUNK = 2048  # tokens in a prefill step
CHUNK_TINY = 32
WARM_STEPS, STEPS = 4, 40
BARE_STEPS = 20  # XLA lets a GPU lag 32 programs behind before a call waits
STARVED = 0.9  # share of the time spent in calls, from which on the host is the limit


@dataclasses.dataclass(frozen=True)
class EngineBench:
    """A model with its weights, and the sizes of the runs."""

    model: FunctionalModel
    weights: Weights
    is_tiny: bool

    @property
    def config(self) -> DecoderConfig:
        return self.model.config

    @property
    def chunk(self) -> int:
        return CHUNK_TINY if self.is_tiny else CHUNK


def bench_for(job: dict[str, Any]) -> EngineBench:
    """Llama-3-8B in bfloat16, or in a rehearsal a tiny model in float32; weights are random."""
    shape = TINY if job["rehearse"] else load_matrix()["models"][MODEL]
    dtype: Any = "float32" if job["rehearse"] else "bfloat16"
    numerics = numerics_for(EngineConfig(dtype=dtype))
    named = model_from_table(MODEL, shape)
    model = FunctionalModel(named.family, named.config, numerics)
    return EngineBench(model, random_weights(model), job["rehearse"])


def random_weights(model: FunctionalModel) -> Weights:
    """Draw weights on the device, scaled so that activations stay near 1."""
    draw = jax.jit(_draw, static_argnames=("shape", "dtype"))
    keys = jax.random.split(jax.random.key(0), len(model.parameters))
    return tuple(
        draw(key, shape=p.shape, dtype=p.dtype)
        for key, p in zip(keys, model.parameters, strict=True)
    )


def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return (jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5).astype(dtype)


def engine_for(bench: EngineBench, rows: int, num_tokens: int) -> Engine:
    """A warmed-up engine for `rows` rows of `num_tokens` each, with two step sizes: one token a
    row, and a chunk of prompts."""
    chunk = bench.chunk
    dtype: Any = bench.model.numerics.dtype.name
    config = EngineConfig(
        cache=CacheConfig(
            page_size=PAGE_SIZE,
            num_pages=rows * (-(-num_tokens // PAGE_SIZE) + 1),
            prefix_cache=False,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=rows),
        dtype=dtype,
        max_model_len=num_tokens,
        min_bucket=rows,
        bucket_growth=max(2, chunk),
    )
    engine = Engine(bench.model, bench.weights, config)
    engine.warm_up()
    return engine


class Decoded(NamedTuple):
    """An engine after a run of decode steps, and their times."""

    engine: Engine
    plan: Any  # the last step's
    total: list[float]  # seconds a step
    host: list[float]  # seconds a step in which the host did not wait
    num_read: float  # cached tokens that a step reads, on average


def _decoded(bench: EngineBench, rows: int, prompt_len: int) -> Decoded:
    """Run `WARM_STEPS` and `STEPS` decode steps of `rows` rows."""
    # Rows whose prompt is complete decode while the other prompts are computed.
    prefill_steps = -(-rows * prompt_len // (bench.chunk - rows)) + 2
    num_tokens = prompt_len + prefill_steps + WARM_STEPS + STEPS + 4
    engine = engine_for(bench, rows, num_tokens)
    plans: list[Any] = []
    dispatch = engine.runner.dispatch
    engine.runner.dispatch = lambda plan: plans.append(plan) or dispatch(plan)  # type: ignore
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add(prompt, params)[0] for prompt in _prompts(bench, rows, prompt_len)]
    total, host = [], []
    while len(total) < WARM_STEPS + STEPS and engine.has_requests:
        engine.step()
        last = engine.stats.last_step
        if last.num_rows == last.num_tokens == rows:
            total.append(last.total_s)
            host.append(last.total_s - last.wait_s)
    if len(total) < WARM_STEPS + STEPS:
        raise RuntimeError(f"only {len(total)} steps decoded all {rows} rows")
    num_read = sum(prompt_len + len(request.output_token_ids) for request in requests)
    num_read -= rows * STEPS / 2
    return Decoded(engine, plans[-1], total[WARM_STEPS:], host[WARM_STEPS:], num_read)


def decode(bench: EngineBench, rows: int, prompt_len: int) -> dict[str, Any]:
    """Time a decode step of `rows` rows, with the host's work and on the device alone.

    A step is host-bound where the host takes longer than the device, or where the device alone
    could not be kept busy; the gap between the two times then means nothing.
    """
    done = _decoded(bench, rows, prompt_len)
    alone, is_starved = _device_step(done)
    step_s, host_s = statistics.median(done.total), statistics.median(done.host)
    return {
        "step_seconds": step_s,
        "tokens_per_second": rows / step_s,
        "host_seconds": host_s,
        "device_step_seconds": alone,
        "gap_seconds": step_s - alone,
        "is_host_bound": is_starved or host_s >= alone,
        "floor_bytes": _read_once(bench) + round(done.num_read) * _token_bytes(bench),
        "rows": rows,
        "context": done.num_read / rows,
    }


def with_and_without_options(bench: EngineBench, rows: int, prompt_len: int) -> dict[str, Any]:
    """Time a decode step on the device alone, compiled with the options that the engine gives XLA
    (`compiling.COMPILER_OPTIONS`) and without them."""
    done = _decoded(bench, rows, prompt_len)
    options = compiling.compiler_options()
    with_s, _ = _device_step(done)
    without_s, _ = _device_step(done, is_plain=True)
    return {"with_seconds": with_s, "without_seconds": without_s, "options": options}


def _device_step(done: Decoded, *, is_plain: bool = False) -> tuple[float, bool]:
    """Time the compiled step on the device alone: repeated on the same inputs, without reading
    results in between. Also returns whether the device still waited for the host.

    `is_plain` compiles the step without the engine's options.
    """
    runner = done.engine.runner
    shape = runner.shape_for(done.plan.num_tokens)
    packed = jax.device_put(build(done.plan, shape, runner.num_slots))
    program = runner._programs[f"step[{shape.num_tokens}]"]
    if is_plain:
        program = runner._lower_step(runner.state, shape).compile()
    for _ in range(2):  # the first call includes one-time set-up
        runner.state, output = program(runner.weights, runner.state, packed)
        np.asarray(output.sampled.tokens)
    started = time.perf_counter()
    for _ in range(BARE_STEPS):
        runner.state, output = program(runner.weights, runner.state, packed)
    issued = time.perf_counter() - started
    np.asarray(output.sampled.tokens)
    taken = time.perf_counter() - started
    return taken / BARE_STEPS, issued > STARVED * taken


def first_token(bench: EngineBench, prompt_len: int) -> dict[str, Any]:
    """Time from adding a prompt to an idle engine to its first token, with the floor's FLOPs."""
    engine = engine_for(bench, 1, prompt_len + 8)
    taken = []
    for _ in range(3):
        [prompt] = _prompts(bench, 1, prompt_len)
        started = time.perf_counter()
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        while not any(update.token_ids for update in engine.step()):
            continue
        taken.append(time.perf_counter() - started)
        while engine.has_requests:
            engine.step()
    c = bench.config
    attention = 2 * c.num_layers * c.num_heads * c.head_dim * prompt_len**2  # half of all pairs
    matrices = _num_matrix_weights(bench) - c.vocab_size * c.model_dim  # the head: one row
    return {
        "seconds": statistics.median(taken[1:]),
        "floor_flops": 2 * matrices * prompt_len + 2 * c.vocab_size * c.model_dim + attention,
        "prompt": prompt_len,
        "chunk": bench.chunk,
    }


def _prompts(bench: EngineBench, count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(time.perf_counter_ns())
    return rng.integers(0, bench.config.vocab_size, (count, length)).tolist()


def _num_matrix_weights(bench: EngineBench) -> int:
    """The number of weights of the layers and the head. An embedding that is not the head is only
    looked up, and does not count."""
    embedding = 0 if bench.config.is_tied else bench.config.vocab_size * bench.config.model_dim
    return sum(math.prod(p.shape) for p in bench.model.parameters) - embedding


def _read_once(bench: EngineBench) -> int:
    return _num_matrix_weights(bench) * bench.model.numerics.dtype.itemsize


def _token_bytes(bench: EngineBench) -> int:
    dtype = bench.model.numerics.dtype
    page_bytes = kv_cache.page_bytes(bench.config.cache, page_size=PAGE_SIZE, dtype=dtype)
    return page_bytes // PAGE_SIZE


def run_engine_job(bench: EngineBench, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job of the device check: `decode`, `options` or `first_token`."""
    prompt_len = job["prompt"]
    if job["kind"] == "decode":
        found = decode(bench, job["rows"], prompt_len)
    elif job["kind"] == "options":
        found = with_and_without_options(bench, job["rows"], prompt_len)
    else:
        found = first_token(bench, prompt_len)
    gc.collect()  # free the engine's pages before the next engine allocates its own
    return found
