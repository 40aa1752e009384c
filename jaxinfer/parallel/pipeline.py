"""Micro-batches, and their way through the stages of a pipeline.

A call of the step advances every stage by one tick: stage s works on the micro-batch that entered s
calls ago (GPipe's schedule, arXiv:1811.06965, without its end: new ones keep coming). What a stage
computed goes to the next one by one `ppermute`; what the host said of a micro-batch stays on every
device while it is under way, since all of them sample at its end. So S micro-batches are in flight,
of different requests, and once the pipeline is full no stage waits:

    call        0   1   2   3   4   5  ...
    stage 0     a   b   c   d   e   f
    stage 1         a   b   c   d   e
    stage 2             a   b   c   d
    stage 3                 a   b   c      sampled at the end of call 3: a's tokens

With one stage a micro-batch enters and leaves in one call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.execution.batch import StepInputs, StepShape
from jaxinfer.sharding.collectives import all_sum, rank

PIPE = ("pipe",)


class MicroBatch(NamedTuple):
    """What the host said of R rows, and where their pages are; [S, ...] of all that are in flight.

    Its own page table, since a slot may get another request's before the last stage is done.
    """

    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]
    row_slot: Int[Array, " R"]
    is_sampled: Int[Array, " R"]
    write_from: Int[Array, " R"]
    rope_len: Int[Array, " R"]
    page_table: Int[Array, "R W"]
    target_ids: Int[Array, " T"]
    wants_prompt_logprobs: Int[Array, " one"]

    @classmethod
    def entering(cls, inputs: StepInputs, page_table: Int[Array, "S W"]) -> MicroBatch:
        given = {name: getattr(inputs, name) for name in cls._fields if name != "page_table"}
        return cls(page_table=page_table[inputs.row_slot], **given)


class InFlight(NamedTuple):
    """Between two calls of a pipeline."""

    batches: MicroBatch  # of each stage's next call but the first's [S - 1, ...]
    activations: Float[Array, "one T D"]  # what this device's stage takes next


def nothing_in_flight(
    num_stages: int, shape: StepShape, table_width: int, num_tokens: int, dim: int, dtype: Any
) -> InFlight:
    """Empty micro-batches of the largest `shape`; `num_tokens` of it are one device's."""
    T, R = shape.num_tokens, shape.num_rows
    rows = dict.fromkeys(MicroBatch._fields, (R,))
    others = {"q_start": (R + 1,), "page_table": (R, table_width), "target_ids": (T,)}
    shapes = rows | others | {"wants_prompt_logprobs": (1,)}
    zeros = {name: jnp.zeros((num_stages - 1, *size), jnp.int32) for name, size in shapes.items()}
    return InFlight(MicroBatch(**zeros), jnp.zeros((1, num_tokens, dim), dtype))


def advance(in_flight: InFlight, entering: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """What the stages work on in this call, [S, ...] of the entering one's shape, and what stays
    in flight after it. Those under way must fit that shape: the host chooses one that does."""

    def joined(behind: jax.Array, new: jax.Array, name: str) -> jax.Array:
        pad = [(0, n - m) for n, m in zip(behind.shape[1:], new.shape, strict=True)]
        # Rows behind the last are empty: they start where it ends.
        new = jnp.pad(new, pad, mode="edge" if name == "q_start" else "constant")
        return jnp.concatenate([new[None], behind])

    pairs = zip(in_flight.batches, entering, MicroBatch._fields, strict=True)
    full = MicroBatch(*(joined(*pair) for pair in pairs))
    cut = lambda a, like: a[(slice(None), *(slice(n) for n in like.shape))]
    working = MicroBatch(*map(cut, full, entering))
    return working, MicroBatch(*(a[:-1] for a in full))


def of_this_stage(working: MicroBatch) -> MicroBatch:
    return MicroBatch(*(lax.dynamic_index_in_dim(a, rank(PIPE), keepdims=False) for a in working))


def last_of(working: MicroBatch) -> MicroBatch:
    """The one that leaves in this call."""
    return MicroBatch(*(a[-1] for a in working))


def entering_stage(embedded: jax.Array, in_flight: InFlight) -> jax.Array:
    """[T, D] that this device's stage takes: the embedded tokens of the entering micro-batch, or
    what the stage before it handed on."""
    handed_on = in_flight.activations[0, : embedded.shape[0]]
    return jnp.where(rank(PIPE) == 0, embedded, handed_on.astype(embedded.dtype))


def hand_on(hidden: Float[Array, "T D"], in_flight: InFlight) -> Float[Array, "one T D"]:
    """Give what this stage computed to the next one."""
    num_stages = in_flight.batches.kv_len.shape[0] + 1
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    received = lax.ppermute(hidden, "pipe", pairs)
    return lax.dynamic_update_slice_in_dim(
        in_flight.activations, received[None].astype(in_flight.activations.dtype), 0, axis=1
    )


def of_last_stage(x: jax.Array, num_stages: int) -> jax.Array:
    """What the devices of the last stage hold, on those of all stages."""
    if num_stages == 1:
        return x
    return all_sum(jnp.where(rank(PIPE) == num_stages - 1, x, jnp.zeros_like(x)), PIPE)
