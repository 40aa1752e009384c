"""The one jitted step: forward, pick the rows' last tokens, sample, remember.

Programs are made here and nowhere else in the engine. Three of them: `step` (one variant a bucket
of tokens), `admit` (a request takes a slot) and `admit_extras` (the same for its masks, biases and
counts, when it has any). State is donated: pages and tables are updated in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxinfer import kv_cache
from jaxinfer.batch import ON_DEVICE, StepInputs, StepShape, unpack
from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.api import token_rows
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.sampling import SampleOutput, sample, top_logprobs
from jaxinfer.sampling_params import MAX_LOGPROBS
from jaxinfer.sampling_slots import (
    NUM_FLOATS,
    NUM_INTS,
    SlotExtras,
    SlotSampling,
    init_slots,
    write_extras,
    write_scalars,
)

NUM_COMPILE_THREADS = 2
PROMPT_LOGPROBS_TILE = 64  # tokens whose logits exist at once


class EngineState(NamedTuple):
    """Everything that lives on the device between steps, but the weights."""

    pages: tuple[KVPages, ...]  # one a layer
    last_token: jax.Array  # [S] int32: what each slot sampled last
    page_table: jax.Array  # [S, W] int32
    sampling: SlotSampling


class PromptLogprobs(NamedTuple):
    """Of each token's successor, for prompts that asked."""

    logprobs: jax.Array  # [T]
    top_ids: jax.Array  # [T, MAX_LOGPROBS]
    top_logprobs: jax.Array  # [T, MAX_LOGPROBS]


class StepOutput(NamedTuple):
    sampled: SampleOutput  # by row
    prompt: PromptLogprobs  # by token


class Program:
    """What is static about an engine's programs. Hashes by identity: it is a jit key."""

    def __init__(self, model: FunctionalModel, *, page_size: int, sample_tile: int | None):
        self.model = model
        self.page_size = page_size
        self.sample_tile = sample_tile


def initial_state(
    model: FunctionalModel,
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    max_len: int,
    cache_dtype,
) -> EngineState:
    """Zeroed pages and tables, every slot unused."""
    return EngineState(
        pages=kv_cache.allocate(
            model.config.cache, num_pages=num_pages, page_size=page_size, dtype=cache_dtype
        ),
        last_token=jnp.zeros(num_slots, jnp.int32),
        page_table=jnp.zeros((num_slots, -(-max_len // page_size)), jnp.int32),
        sampling=init_slots(num_slots, model.config.vocab_size),
    )


def _step(
    weights: Weights, state: EngineState, packed: jax.Array, *, program: Program, shape: StepShape
) -> tuple[EngineState, StepOutput]:
    inputs = unpack(packed, shape)
    decoder = program.model.merge(weights)
    page_table = state.page_table.at[inputs.entry_slot, inputs.entry_index].set(
        inputs.entry_page, mode="drop"
    )
    batch = kv_cache.ragged_batch(
        shape.num_tokens,
        inputs.q_start,
        inputs.kv_len,
        page_table[inputs.row_slot],
        inputs.rope_len,
        inputs.write_from,
        page_size=program.page_size,
        num_pages=state.pages[0].k.shape[0],
    )
    token_ids = _token_ids(inputs, state.last_token)
    hidden, pages = decoder(token_ids, batch, state.pages)

    last = jnp.maximum(inputs.q_start[1:] - 1, 0)
    is_sampled = inputs.is_sampled != 0
    sampled, sampling = sample(
        decoder.logits(hidden[last]),
        state.sampling,
        inputs.row_slot,
        inputs.kv_len,
        is_sampled,
        jax.random.key(0),  # requests bring their own seeds
        program.sample_tile,
    )
    num_slots = state.last_token.shape[0]
    slot = jnp.where(is_sampled, inputs.row_slot, num_slots)
    new_state = EngineState(
        pages=pages,
        last_token=state.last_token.at[slot].set(sampled.tokens, mode="drop"),
        page_table=page_table,
        sampling=sampling,
    )
    return new_state, StepOutput(sampled, _prompt_logprobs(decoder, hidden, inputs))


def _token_ids(inputs: StepInputs, last_token: jax.Array) -> jax.Array:
    """[T]: a token the host does not know is the last one its row's slot sampled."""
    T, R = inputs.token_ids.shape[0], inputs.kv_len.shape[0]
    row = token_rows(T, inputs.q_start)
    on_device = last_token[inputs.row_slot[jnp.minimum(row, R - 1)]]
    return jnp.where(inputs.token_ids == ON_DEVICE, on_device, inputs.token_ids)


def _prompt_logprobs(decoder, hidden: jax.Array, inputs: StepInputs) -> PromptLogprobs:
    """Head and log-softmax over all tokens, tile by tile, and only where a prompt asked."""
    T = hidden.shape[0]

    def compute():
        tile = min(PROMPT_LOGPROBS_TILE, T)
        pad = -T % tile
        tiles = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, tile, hidden.shape[1])
        targets = jnp.pad(inputs.target_ids, (0, pad)).reshape(-1, tile)
        of_tile = lambda x: top_logprobs(decoder.logits(x[0]), x[1])
        parts = jax.lax.map(of_tile, (tiles, targets))
        return PromptLogprobs(*(p.reshape(-1, *p.shape[2:])[:T] for p in parts))

    def nothing():
        shape = (T, MAX_LOGPROBS)
        return PromptLogprobs(jnp.zeros(T), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    return jax.lax.cond(inputs.wants_prompt_logprobs[0] != 0, compute, nothing)


class Admission(NamedTuple):
    """What a request writes into its slot when it is admitted."""

    slot: int
    pages: list[int]
    ints: np.ndarray  # [NUM_INTS] of sampling_slots
    floats: np.ndarray  # [NUM_FLOATS]

    def pack(self, table_width: int) -> np.ndarray:
        """int32 [1 + W + NUM_INTS + NUM_FLOATS]; the floats travel as their bits."""
        table = np.zeros(table_width, np.int32)
        table[: len(self.pages)] = self.pages
        return np.concatenate(
            [np.asarray([self.slot], np.int32), table, self.ints, self.floats.view(np.int32)]
        )


def _admit(state: EngineState, packed: jax.Array) -> EngineState:
    W = state.page_table.shape[1]
    slot, table, ints, floats = jnp.split(packed, [1, 1 + W, 1 + W + NUM_INTS])
    assert floats.shape == (NUM_FLOATS,)
    floats = jax.lax.bitcast_convert_type(floats, jnp.float32)
    return state._replace(
        page_table=state.page_table.at[slot[0]].set(table),
        sampling=write_scalars(state.sampling, slot[0], ints, floats),
    )


def _admit_extras(state: EngineState, slot: jax.Array, extras: SlotExtras) -> EngineState:
    return state._replace(sampling=write_extras(state.sampling, slot, extras))


# Static: the program (once an engine) and the shape (once a bucket). Donated: the state.
step = jax.jit(_step, static_argnames=("program", "shape"), donate_argnames=("state",))
# One variant each. Donated: the state.
admit = jax.jit(_admit, donate_argnames=("state",))
admit_extras = jax.jit(_admit_extras, donate_argnames=("state",))


# GPU: left alone, XLA cuts a decode step's products along the contracted axis, and each sum of
# parts is one kernel more, with which neither the addition to the residual stream nor the norm
# behind it is fused (a Llama-3-8B layer compiled for an H100, jax 0.10.2: 11 launches so, 8 with).
COMPILER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {"xla_gpu_experimental_force_split_k": 1}
}
_nothing = jax.jit(lambda: 0)  # to ask XLA which options it knows


def compiler_options() -> dict[str, Any]:
    """For `lower().compile(compiler_options=...)`, of the platform that is traced for. An option
    that the installed XLA does not know is left out, and logged: it changes speed alone."""
    options = COMPILER_OPTIONS.get(platform(), {})
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.lru_cache
def _is_known(name: str, value: Any) -> bool:
    try:
        _nothing.lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        logging.warning("this XLA has no option %s: a step takes more launches", name)
        return False
    return True


def compile_program(lowered: Any) -> Any:
    return lowered.compile(compiler_options=compiler_options())


def compile_programs(
    lower: Mapping[Any, Callable[[], Any]], on_compiled: Callable[[Any, Any], None]
) -> None:
    """Lower and compile every program; `on_compiled` gets the key and the program of each one done.

    Tracing holds Python's lock, compiling does not: one thread traces, two compile.
    """
    options = compiler_options()
    compiled = lambda lowered: lowered.compile(compiler_options=options)
    with ThreadPoolExecutor(NUM_COMPILE_THREADS) as pool:
        try:
            futures = {pool.submit(compiled, trace()): key for key, trace in lower.items()}
            for future in as_completed(futures):
                on_compiled(futures[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def forget_traces() -> None:
    """Drop what jit remembers of traced programs; compiled ones live with who compiled them.

    jit's caches would hold every engine's executables for the life of the process. On a CPU one is
    some 450 memory maps; Linux allows a process 65,530, and XLA aborts past them.
    """
    for program in (step, admit, admit_extras):
        program.clear_cache()  # type: ignore[attr-defined]
