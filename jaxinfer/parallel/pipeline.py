"""Micro-batches, and their way through the stages of a pipeline.

Each call of the step advances every stage by one tick: stage s works on the micro-batch that
entered s calls ago (GPipe's schedule, arXiv:1811.06965, without its drain, since new micro-batches
keep coming). A stage sends its hidden states to the next one by one `ppermute`. What the host said
about a micro-batch stays on every device while it is in flight, because all of them sample at its
end. So S micro-batches of different requests are in flight, and no stage of a full pipeline waits:

    call        0   1   2   3   4   5  ...
    stage 0     a   b   c   d   e   f
    stage 1         a   b   c   d   e
    stage 2             a   b   c   d
    stage 3                 a   b   c      at the end of call 3, a's tokens are sampled
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.execution.batch import StepShape
from jaxinfer.execution.forward import StepBatch
from jaxinfer.sharding.collectives import all_sum, rank

PIPE = ("pipe",)


class InFlight(NamedTuple):
    """What a pipeline keeps between two calls. A micro-batch brings its own page table, since a
    slot may get another request's pages before the last stage is done."""

    batches: StepBatch  # each array [S - 1, ...]: of the next call's stages but the first
    activations: Float[Array, "one T D"]  # what this device's stage takes next


def empty(
    num_stages: int, shape: StepShape, table_width: int, activations: jax.ShapeDtypeStruct
) -> InFlight:
    """Empty micro-batches of the largest `shape`, and zeros for the activations of one device."""
    T, R = shape.num_tokens, shape.num_rows
    rows = dict.fromkeys(StepBatch._fields, (R,))
    others = {"q_start": (R + 1,), "page_table": (R, table_width), "target_ids": (T,)}
    shapes = rows | others | {"wants_prompt_logprobs": (1,)}
    zeros = {name: jnp.zeros((num_stages - 1, *size), jnp.int32) for name, size in shapes.items()}
    return InFlight(StepBatch(**zeros), jnp.zeros(activations.shape, activations.dtype))


def advance(in_flight: InFlight, entering: StepBatch) -> tuple[StepBatch, StepBatch]:
    """Return what the stages work on in this call, [S, ...] in the shape of the entering batch, and
    what stays in flight after it.

    Batches in flight must fit that shape: the host chooses one that does (`Runner.dispatch`).
    """

    def joined(waiting: jax.Array, new: jax.Array, name: str) -> jax.Array:
        pad = [(0, n - m) for n, m in zip(waiting.shape[1:], new.shape, strict=True)]
        # Rows behind the last are empty: they start where it ends.
        new = jnp.pad(new, pad, mode="edge" if name == "q_start" else "constant")
        return jnp.concatenate([new[None], waiting])

    pairs = zip(in_flight.batches, entering, StepBatch._fields, strict=True)
    full = StepBatch(*(joined(*pair) for pair in pairs))
    cut = lambda a, like: a[(slice(None), *(slice(n) for n in like.shape))]
    working = StepBatch(*map(cut, full, entering))
    return working, StepBatch(*(a[:-1] for a in full))


def stage_batch(working: StepBatch) -> StepBatch:
    """The batch that this device's stage works on."""
    return StepBatch(*(lax.dynamic_index_in_dim(a, rank(PIPE), keepdims=False) for a in working))


def last_batch(working: StepBatch) -> StepBatch:
    """The batch that leaves the pipeline in this call."""
    return StepBatch(*(a[-1] for a in working))


def stage_input(embedded: jax.Array, in_flight: InFlight) -> jax.Array:
    """[T, D] that this device's stage takes: the embedded tokens of the entering batch on the first
    stage, elsewhere what the stage before it sent."""
    received = in_flight.activations[0, : embedded.shape[0]]
    return jnp.where(rank(PIPE) == 0, embedded, received.astype(embedded.dtype))


def send_to_next(hidden: Float[Array, "T D"], in_flight: InFlight) -> Float[Array, "one T D"]:
    """Send what this stage computed to the next one; return what this device received."""
    num_stages = in_flight.batches.kv_len.shape[0] + 1
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    received = lax.ppermute(hidden, "pipe", pairs)
    return lax.dynamic_update_slice_in_dim(
        in_flight.activations, received[None].astype(in_flight.activations.dtype), 0, axis=1
    )


def from_last_stage(x: jax.Array, num_stages: int) -> jax.Array:
    """What the devices of the last stage hold, on the devices of every stage."""
    return all_sum(jnp.where(rank(PIPE) == num_stages - 1, x, jnp.zeros_like(x)), PIPE)
