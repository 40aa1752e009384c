"""The one jitted step: forward, pick the rows' last tokens, sample, remember.

Programs are made here and nowhere else in the engine: `step` (one variant a bucket of tokens),
`admit` (a request takes a slot), `admit_extras` (the same for its masks, biases and counts, when it
has any), and `initial_state`. State is donated: pages and tables are updated in place.

On a mesh every device runs the same program on its own parts (`Program.on_mesh`), and collectives
stand where the model says (`nn.layers.Linear`, `Embedding`), in sampling over a split vocabulary,
and between the stages of a pipeline (`micro_batch`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.execution.batch import ON_DEVICE, StepInputs, StepShape, unpack
from jaxinfer.execution.state import EngineState, Program, initial_parts
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.api import token_rows
from jaxinfer.models.functional import Weights
from jaxinfer.nn.ragged import RaggedBatch, StepRows, ragged_batch
from jaxinfer.parallel import pipeline as micro_batch
from jaxinfer.parallel.pipeline import InFlight, MicroBatch
from jaxinfer.parallel.sharded_model import NOTHING, ShardedModel, unstacked
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sampling.sample import SampleOutput, sample, top_logprobs
from jaxinfer.sampling.slots import (
    NUM_FLOATS,
    NUM_INTS,
    SlotExtras,
    write_extras,
    write_scalars,
)
from jaxinfer.sharding.zigzag import TokenSplit

PROMPT_LOGPROBS_TILE = 64  # tokens whose logits exist at once


class PromptLogprobs(NamedTuple):
    """Of each token's successor, for prompts that asked."""

    logprobs: jax.Array  # [T]
    top_ids: jax.Array  # [T, MAX_LOGPROBS]
    top_logprobs: jax.Array  # [T, MAX_LOGPROBS]


class StepOutput(NamedTuple):
    sampled: SampleOutput  # by row
    prompt: PromptLogprobs  # by token


def _step(
    weights: Weights, state: EngineState, packed: jax.Array, *, program: Program, shape: StepShape
) -> tuple[EngineState, StepOutput]:
    run = partial(_run_parts, program=program, shape=shape)
    of_weights, of_state = program.specs
    on_mesh = program.on_mesh(run, (of_weights, of_state, NOTHING), (of_state, NOTHING))
    return on_mesh(weights, state, packed)


def _run_parts(
    weights: Weights, state: EngineState, packed: jax.Array, *, program: Program, shape: StepShape
) -> tuple[EngineState, StepOutput]:
    """The step as each device runs it, on its parts of weights and state."""
    inputs = unpack(packed, shape)
    model = program.model
    decoder = model.local.merge(unstacked(weights, model))
    page_table = state.page_table.at[inputs.entry_slot, inputs.entry_index].set(
        inputs.entry_page, mode="drop"
    )
    entering = MicroBatch.entering(inputs, page_table)
    split = TokenSplit.of(model.layout, shape.num_tokens)
    token_ids = split.own(_token_ids(inputs, state.last_token))
    ragged = partial(_ragged, T=shape.num_tokens, program=program, pages=state.pages)
    in_flight = state.in_flight
    if in_flight is None:
        leaving = entering
        hidden, pages = decoder(token_ids, ragged(entering), state.pages)
    else:
        working, behind = micro_batch.advance(in_flight, entering)
        leaving = micro_batch.last_of(working)
        embedded = decoder.embedded(token_ids, ragged(entering))
        hidden, pages = decoder.run(
            micro_batch.entering_stage(embedded, in_flight),
            ragged(micro_batch.of_this_stage(working)),
            state.pages,
        )
        in_flight = InFlight(behind, micro_batch.hand_on(hidden, in_flight))

    last = jnp.maximum(leaving.q_start[1:] - 1, 0)
    last_hidden = micro_batch.of_last_stage(split.at(hidden, last), model.num_stages)
    is_sampled = leaving.is_sampled != 0
    sampled, sampling = sample(
        decoder.logits(last_hidden),
        state.sampling,
        leaving.row_slot,
        leaving.kv_len,
        is_sampled,
        jax.random.key(0),  # requests bring their own seeds
        program.sample_tile,
        model.layout.axes("vocab"),
    )
    num_slots = state.last_token.shape[0]
    slot = jnp.where(is_sampled, leaving.row_slot, num_slots)
    new_state = EngineState(
        pages=pages,
        last_token=state.last_token.at[slot].set(sampled.tokens, mode="drop"),
        page_table=page_table,
        sampling=sampling,
        in_flight=in_flight,
    )
    return new_state, StepOutput(sampled, _prompt_logprobs(decoder, hidden, leaving, model, split))


def _ragged(
    batch: MicroBatch, *, T: int, program: Program, pages: tuple[KVPages, ...]
) -> RaggedBatch:
    rows = StepRows(batch.q_start, batch.kv_len, batch.page_table, batch.write_from, batch.rope_len)
    return ragged_batch(
        rows,
        T,
        page_size=program.cells,
        num_pages=pages[0].k.shape[0],
        layout=program.model.layout,
    )


def _token_ids(inputs: StepInputs, last_token: jax.Array) -> jax.Array:
    """[T]: a token the host does not know is the last one its row's slot sampled."""
    T, R = inputs.token_ids.shape[0], inputs.kv_len.shape[0]
    row = token_rows(T, inputs.q_start)
    on_device = last_token[inputs.row_slot[jnp.minimum(row, R - 1)]]
    return jnp.where(inputs.token_ids == ON_DEVICE, on_device, inputs.token_ids)


def _prompt_logprobs(
    decoder, hidden: jax.Array, batch: MicroBatch, model: ShardedModel, split: TokenSplit
) -> PromptLogprobs:
    """Head and log-softmax over all tokens, tile by tile, and only where a prompt asked. A device
    takes those that it has: only what comes of them is gathered."""
    T, own = split.num_tokens, split.num_own

    def compute():
        tile = min(PROMPT_LOGPROBS_TILE, own)
        pad = -own % tile
        last = micro_batch.of_last_stage(hidden, model.num_stages)
        tiles = jnp.pad(last, ((0, pad), (0, 0))).reshape(-1, tile, hidden.shape[1])
        targets = jnp.pad(split.own(batch.target_ids), (0, pad)).reshape(-1, tile)
        vocab_axes = model.layout.axes("vocab")
        of_tile = lambda x: top_logprobs(decoder.logits(x[0]), x[1], vocab_axes)
        parts = jax.lax.map(of_tile, (tiles, targets))
        return PromptLogprobs(*(split.all(p.reshape(-1, *p.shape[2:])[:own]) for p in parts))

    def nothing():
        shape = (T, MAX_LOGPROBS)
        return PromptLogprobs(jnp.zeros(T), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    return jax.lax.cond(batch.wants_prompt_logprobs[0] != 0, compute, nothing)


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


def _admit(state: EngineState, packed: jax.Array, *, program: Program) -> EngineState:
    of_state = program.specs[1]
    return program.on_mesh(_write_slot, (of_state, NOTHING), of_state)(state, packed)


def _write_slot(state: EngineState, packed: jax.Array) -> EngineState:
    W = state.page_table.shape[1]
    slot, table, ints, floats = jnp.split(packed, [1, 1 + W, 1 + W + NUM_INTS])
    assert floats.shape == (NUM_FLOATS,)
    floats = jax.lax.bitcast_convert_type(floats, jnp.float32)
    return state._replace(
        page_table=state.page_table.at[slot[0]].set(table),
        sampling=write_scalars(state.sampling, slot[0], ints, floats),
    )


def _admit_extras(
    state: EngineState, slot: jax.Array, extras: SlotExtras, *, program: Program
) -> EngineState:
    of_state = program.specs[1]
    on_mesh = program.on_mesh(_write_slot_extras, (of_state, NOTHING, NOTHING), of_state)
    return on_mesh(state, slot, extras)


def _write_slot_extras(state: EngineState, slot: jax.Array, extras: SlotExtras) -> EngineState:
    return state._replace(sampling=write_extras(state.sampling, slot, extras))


def _initial_state(*, program: Program, num_pages: int) -> EngineState:
    return program.on_mesh(lambda: initial_parts(program, num_pages), (), program.specs[1])()


# Each device of a mesh makes its own zeros. Static: all.
initial_state = jax.jit(_initial_state, static_argnames=("program", "num_pages"))
# Static: the program (once an engine) and the shape (once a bucket). Donated: the state.
step = jax.jit(_step, static_argnames=("program", "shape"), donate_argnames=("state",))
# One variant each. Donated: the state.
admit = jax.jit(_admit, static_argnames=("program",), donate_argnames=("state",))
admit_extras = jax.jit(_admit_extras, static_argnames=("program",), donate_argnames=("state",))


def forget_traces() -> None:
    """Drop what jit remembers of traced programs; compiled ones live with who compiled them.

    jit's caches would hold every engine's executables for the life of the process. On a CPU one is
    some 450 memory maps; Linux allows a process 65,530, and XLA aborts past them.
    """
    for program in (step, admit, admit_extras, initial_state):
        program.clear_cache()  # type: ignore[attr-defined]
