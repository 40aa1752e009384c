"""The engine end to end on the device, with random weights: decode speed, time to the first token.

The floors are what the device measured in this run allows: a decode step reads the weights (of an
untied embedding its rows alone) and the cached tokens of every row once, at the copy bandwidth; a
prompt takes 2 FLOP a weight and token and the products of the attention, at the bfloat16 rate.
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
CHUNK = 2048  # tokens of a prefill step
CHUNK_TINY = 32
WARM_STEPS, STEPS = 4, 40
BARE_STEPS = 20  # XLA lets a GPU lag 32 programs behind before a call waits
STARVED = 0.9  # of the time spent in calls: then they are what takes it


@dataclasses.dataclass(frozen=True)
class EngineBench:
    """A model with its weights, and the sizes of what is run."""

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
    """Made on the device, at the size that keeps activations near 1."""
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
    """An engine of `rows` rows of `num_tokens` each, warmed up; it has two steps: one token a row,
    and a chunk of prompts."""
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
    """An engine that has decoded for a while, and what that took."""

    engine: Engine
    plan: Any  # of the last step
    total: list[float]  # seconds a step
    host: list[float]  # of it, those in which the host did not wait
    num_read: float  # cached tokens that a step in the middle read


def _decoded(bench: EngineBench, rows: int, prompt_len: int) -> Decoded:
    """After `WARM_STEPS` and `STEPS` of one token for each of `rows` rows."""
    # Those whose prompt is done decode on while the others' are computed.
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
        last = engine.last_step
        if last.num_rows == last.num_tokens == rows:
            total.append(last.total_s)
            host.append(last.total_s - last.wait_s)
    if len(total) < WARM_STEPS + STEPS:
        raise RuntimeError(f"only {len(total)} steps decoded all {rows} rows")
    num_read = sum(prompt_len + len(request.output_token_ids) for request in requests)
    num_read -= rows * STEPS / 2
    return Decoded(engine, plans[-1], total[WARM_STEPS:], host[WARM_STEPS:], num_read)


def decode(bench: EngineBench, rows: int, prompt_len: int) -> dict[str, Any]:
    """Seconds of a step that decodes one token for each of `rows` rows, with all that the host does
    and of the device alone; the floor's bytes.

    Host-bound: the host takes longer for a step than the device, or the device alone could not be
    kept busy; the gap between the two says nothing then.
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
    """Seconds of a decode step of the device alone, compiled with the options that the engine gives
    XLA (`compiling.COMPILER_OPTIONS`) and without them."""
    done = _decoded(bench, rows, prompt_len)
    options = compiling.compiler_options()
    with_s, _ = _device_step(done)
    without_s, _ = _device_step(done, is_plain=True)
    return {"with_seconds": with_s, "without_seconds": without_s, "options": options}


def _device_step(done: Decoded, *, is_plain: bool = False) -> tuple[float, bool]:
    """Seconds of the device alone, and whether it waited for the host even so: the compiled step on
    inputs that are there, again and again, nothing read between.

    `is_plain`: compiled without the engine's options.
    """
    runner = done.engine.runner
    shape = runner.shape_for(done.plan.num_tokens)
    packed = jax.device_put(build(done.plan, shape, runner.num_slots))
    program = runner._programs[f"step[{shape.num_tokens}]"]
    if is_plain:
        program = runner._lower_step(runner.state, shape).compile()
    for _ in range(2):  # a first call sets up what later ones find
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
    """Seconds from adding a prompt to an idle engine to its first token; the floor's FLOPs."""
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
    """Of the layers and the head: an embedding is looked up, unless it is the head too."""
    embedding = 0 if bench.config.is_tied else bench.config.vocab_size * bench.config.model_dim
    return sum(math.prod(p.shape) for p in bench.model.parameters) - embedding


def _read_once(bench: EngineBench) -> int:
    return _num_matrix_weights(bench) * bench.model.numerics.dtype.itemsize


def _token_bytes(bench: EngineBench) -> int:
    dtype = bench.model.numerics.dtype
    of_page = kv_cache.page_bytes(bench.config.cache, page_size=PAGE_SIZE, dtype=dtype)
    return of_page // PAGE_SIZE


def run(bench: EngineBench, job: dict[str, Any]) -> dict[str, Any]:
    """A job of the device check: `decode` of `rows`, `options` at such a step, or `first_token`."""
    prompt_len = job["prompt"]
    if job["kind"] == "decode":
        found = decode(bench, job["rows"], prompt_len)
    elif job["kind"] == "options":
        found = with_and_without_options(bench, job["rows"], prompt_len)
    else:
        found = first_token(bench, prompt_len)
    gc.collect()  # the engine's pages, before the next one's
    return found
