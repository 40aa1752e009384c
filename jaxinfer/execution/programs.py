"""The jitted programs of an engine: the step, admission into a slot, and the first state.

`step` has one variant for each bucket of tokens. `admit` writes a request into its slot, and
`admit_extras` writes its masks, biases and counts, which few requests have. State is donated: pages
and tables are updated in place. On a mesh each program is one `shard_map` (`Program.on_mesh`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.execution.batch import StepShape
from jaxinfer.execution.state import EngineState, Program, initial_parts
from jaxinfer.execution.step import StepOutput, run_step
from jaxinfer.models.functional import Weights
from jaxinfer.parallel.sharded_model import REPLICATED
from jaxinfer.sampling.slots import NUM_FLOATS, NUM_INTS, SlotExtras, write_extras, write_scalars


class Admission(NamedTuple):
    """What a request writes into its slot when it is admitted."""

    slot: int
    pages: list[int]
    ints: np.ndarray  # [NUM_INTS], as `sampling.slots.pack` makes them
    floats: np.ndarray  # [NUM_FLOATS]

    def pack(self, table_width: int) -> np.ndarray:
        """int32 [1 + W + NUM_INTS + NUM_FLOATS]; the floats travel as their bits."""
        table = np.zeros(table_width, np.int32)
        table[: len(self.pages)] = self.pages
        return np.concatenate(
            [np.asarray([self.slot], np.int32), table, self.ints, self.floats.view(np.int32)]
        )


def packed_admission(table_width: int) -> jax.ShapeDtypeStruct:
    """The shape of a packed `Admission`."""
    return jax.ShapeDtypeStruct((1 + table_width + NUM_INTS + NUM_FLOATS,), jnp.int32)


def _step(
    weights: Weights, state: EngineState, packed: jax.Array, *, program: Program, shape: StepShape
) -> tuple[EngineState, StepOutput]:
    run = partial(run_step, program=program, shape=shape)
    weight_specs, state_specs = program.specs
    on_mesh = program.on_mesh(
        run, (weight_specs, state_specs, REPLICATED), (state_specs, REPLICATED)
    )
    return on_mesh(weights, state, packed)


def _admit(state: EngineState, packed: jax.Array, *, program: Program) -> EngineState:
    _, specs = program.specs
    return program.on_mesh(_write_slot, (specs, REPLICATED), specs)(state, packed)


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
    _, specs = program.specs
    on_mesh = program.on_mesh(_write_slot_extras, (specs, REPLICATED, REPLICATED), specs)
    return on_mesh(state, slot, extras)


def _write_slot_extras(state: EngineState, slot: jax.Array, extras: SlotExtras) -> EngineState:
    return state._replace(sampling=write_extras(state.sampling, slot, extras))


def _initial_state(*, program: Program, num_pages: int) -> EngineState:
    _, specs = program.specs
    return program.on_mesh(lambda: initial_parts(program, num_pages), (), specs)()


# Static arguments: all. Each device of a mesh makes its own zeros.
initial_state = jax.jit(_initial_state, static_argnames=("program", "num_pages"))
# Static arguments: the program (one for an engine) and the shape (one for a bucket).
step = jax.jit(_step, static_argnames=("program", "shape"), donate_argnames=("state",))
admit = jax.jit(_admit, static_argnames=("program",), donate_argnames=("state",))
admit_extras = jax.jit(_admit_extras, static_argnames=("program",), donate_argnames=("state",))


def clear_jit_caches() -> None:
    """Drop the programs that jit has traced; a compiled one lives with whoever compiled it.

    jit's caches would keep every engine's executables for the life of the process. On a CPU one
    takes some 450 memory maps; Linux allows a process 65,530, and XLA aborts past them.
    """
    for program in (step, admit, admit_extras, initial_state):
        program.clear_cache()  # type: ignore[attr-defined]  # pyright sees a plain function
