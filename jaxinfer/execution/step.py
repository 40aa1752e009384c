"""One step of the model, as a device computes it: forward, sample, remember.

The step takes the weights, the state that lives on the device between steps, and one packed buffer
of integers (`batch.py`), and gives the new state and the tokens that the rows sampled. Nothing here
is jitted; `programs.py` makes the programs.

On a mesh every device runs this on its own parts of weights and state, inside `shard_map`.
Collectives are in the layers, in sampling over a split vocabulary, and in the forward pass that
`parallel/forward.py` puts in the place of the plain one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.execution.batch import ON_DEVICE, StepInputs, StepShape, unpack
from jaxinfer.execution.forward import Forward, ForwardOutput, StepBatch
from jaxinfer.execution.state import EngineState, Program
from jaxinfer.kernels.paged_attention.api import token_rows
from jaxinfer.models.functional import Weights
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sampling.sample import SampleOutput, sample, top_logprobs

PROMPT_LOGPROBS_TILE = 64  # tokens whose logits exist at once


class PromptLogprobs(NamedTuple):
    """The log-probability of each prompt token's successor; zeros if no prompt wants them."""

    logprobs: jax.Array  # [T]
    top_ids: jax.Array  # [T, MAX_LOGPROBS]
    top_logprobs: jax.Array  # [T, MAX_LOGPROBS]


class StepOutput(NamedTuple):
    """What the host reads of a step."""

    sampled: SampleOutput  # by row
    prompt: PromptLogprobs  # by token


def run_step(
    weights: Weights, state: EngineState, packed: jax.Array, *, program: Program, shape: StepShape
) -> tuple[EngineState, StepOutput]:
    """Run a step of a bucket's `shape` over `packed` (`batch.build`)."""
    forward, model = program.forward, program.model
    inputs = unpack(packed, shape)
    decoder = model.local.merge(forward.local_weights(weights))
    page_table = state.page_table.at[inputs.entry_slot, inputs.entry_index].set(
        inputs.entry_page, mode="drop"
    )
    entering = StepBatch.of(inputs, page_table)
    token_ids = _token_ids(inputs, state.last_token)
    output = forward(decoder, token_ids, entering, state.pages, state.carry)

    batch = output.batch
    last_hidden = forward.last_hidden(output, jnp.maximum(batch.q_start[1:] - 1, 0))
    is_sampled = batch.is_sampled != 0
    sampled, sampling = sample(
        decoder.logits(last_hidden),
        state.sampling,
        batch.row_slot,
        batch.kv_len,
        is_sampled,
        jax.random.key(0),  # requests bring their own seeds
        program.sample_tile,
        model.layout.axes("vocab"),
    )
    num_slots = state.last_token.shape[0]
    slot = jnp.where(is_sampled, batch.row_slot, num_slots)
    new_state = EngineState(
        pages=output.pages,
        last_token=state.last_token.at[slot].set(sampled.tokens, mode="drop"),
        page_table=page_table,
        sampling=sampling,
        carry=output.carry,
    )
    vocab_axes = model.layout.axes("vocab")
    return new_state, StepOutput(sampled, _prompt_logprobs(decoder, forward, output, vocab_axes))


def _token_ids(inputs: StepInputs, last_token: jax.Array) -> jax.Array:
    """[T]: a token that the host does not know is the last one its row's slot sampled."""
    T, R = inputs.token_ids.shape[0], inputs.kv_len.shape[0]
    row = token_rows(T, inputs.q_start)
    on_device = last_token[inputs.row_slot[jnp.minimum(row, R - 1)]]
    return jnp.where(inputs.token_ids == ON_DEVICE, on_device, inputs.token_ids)


def _prompt_logprobs(
    decoder: Any, forward: Forward, output: ForwardOutput, vocab_axes: tuple[str, ...]
) -> PromptLogprobs:
    """Apply the head and log-softmax to all tokens, tile by tile, and only if a prompt wants it."""
    batch, hidden = output.batch, output.hidden
    T, own = batch.num_tokens, hidden.shape[0]  # of a split sequence a device has a part

    def compute():
        tile = min(PROMPT_LOGPROBS_TILE, own)
        pad = -own % tile
        final = forward.prompt_hidden(output)
        tiles = jnp.pad(final, ((0, pad), (0, 0))).reshape(-1, tile, hidden.shape[1])
        targets = jnp.pad(forward.own_tokens(batch.target_ids), (0, pad)).reshape(-1, tile)
        of_tile = lambda x: top_logprobs(decoder.logits(x[0]), x[1], vocab_axes)
        parts = jax.lax.map(of_tile, (tiles, targets))
        whole = lambda part: forward.all_tokens(part.reshape(-1, *part.shape[2:])[:own], T)
        return PromptLogprobs(*map(whole, parts))

    def nothing():
        shape = (T, MAX_LOGPROBS)
        return PromptLogprobs(jnp.zeros(T), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    return jax.lax.cond(batch.wants_prompt_logprobs[0] != 0, compute, nothing)
