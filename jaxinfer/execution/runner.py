"""The runner: weights and state on the device, and the compiled programs that work on them.

Programs are compiled ahead of time, one for each bucket, so that nothing compiles unnoticed after
warm-up. A program that warm-up left out is compiled when first needed, logged and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxinfer.config import EngineConfig
from jaxinfer.engine.scheduler import Plan
from jaxinfer.execution import programs
from jaxinfer.execution.agreement import agree_on_memory
from jaxinfer.execution.batch import StepShape, build, packed_size
from jaxinfer.execution.compile import compile_program, compile_programs
from jaxinfer.execution.forward import Forward
from jaxinfer.execution.memory import MemoryPlan, bytes_per_device, device_limit, plan_pages
from jaxinfer.execution.programs import Admission, packed_admission
from jaxinfer.execution.state import EngineState, Program, StateSizes, initial_parts
from jaxinfer.execution.step import StepOutput
from jaxinfer.kernels.dispatch import platform
from jaxinfer.models.functional import Weights
from jaxinfer.parallel.hosts.messages import Op
from jaxinfer.sampling.slots import SlotExtras

CPU_SAMPLE_TILE = 8  # rows sampled at once on a CPU: their temporaries stay in its cache


class Runner:
    """Runs plans. `max_model_len`, the longest request in tokens, fixes the page table's width.

    `stages` has the plan that each stage of a pipeline works on since the last `dispatch`, the one
    that entered last first (None: nothing). Without a pipeline that is one plan.

    With several processes each has a runner. Process 0 sends the calls `run_...` and `reset_state`
    with their arguments to its `peers`, which make the same calls (`hosts.follow`).
    """

    def __init__(
        self, forward: Forward, weights: Weights, config: EngineConfig, max_model_len: int
    ):
        self.model = model = forward.model
        self.peers = model.peers
        self.weights = weights
        self.config = config
        self.max_model_len = max_model_len
        self.num_slots = config.scheduler.max_num_seqs
        self.num_late_compiles = 0  # programs compiled after warm-up
        self.compile_seconds = 0.0  # tracing and compiling, by the clock
        self._is_warm = False
        self._programs: dict[str, Any] = {}
        on_cpu = platform() == "cpu"
        self.program = Program(
            forward,
            weights,
            sizes=StateSizes.of(config, model.model.numerics, max_model_len),
            sample_tile=CPU_SAMPLE_TILE if on_cpu else None,
        )
        self.memory = agree_on_memory(self._plan_memory(), model, weights, config, max_model_len)
        self._initial_state = self._compile_initial_state()
        self._make_state()
        self.table_width = self.program.sizes.table_width

    @property
    def cache_dtype(self) -> jnp.dtype:
        return self.program.sizes.cache_dtype

    @property
    def num_compiled(self) -> int:
        return len(self._programs)

    @property
    def num_programs(self) -> int:
        """The programs that `warm_up` compiles: one for each bucket, and two for admission."""
        return len(self.config.buckets) + 2

    def shape_for(self, num_tokens: int) -> StepShape:
        """The shape of the smallest bucket that holds `num_tokens`."""
        bucket = self.config.bucket_for(num_tokens)
        return StepShape.of_bucket(bucket, self.num_slots, self.config.cache.page_size)

    def warm_up(self, on_progress: Callable[[str], None] = lambda program: None) -> None:
        """Compile every program; `on_progress` gets the name of each one."""
        shapes = [self.shape_for(bucket) for bucket in reversed(self.config.buckets)]
        todo: dict[str, Callable[[], Any]] = {
            f"step[{shape.num_tokens}]": partial(self._lower_step, self.state, shape)
            for shape in shapes
        }
        todo |= {"admit": self._lower_admit, "admit_extras": self._lower_extras}
        started = time.perf_counter()

        def done(name: str, program: Any) -> None:
            self._programs[name] = program
            on_progress(name)

        compile_programs(todo, done)
        programs.clear_jit_caches()
        self.compile_seconds = time.perf_counter() - started
        self._is_warm = True

    def reset_state(self) -> None:
        """Make a fresh state; an interrupted step may have consumed the donated old one."""
        with self.peers.call(Op.RESET, 0):
            self._make_state()

    def _compile_initial_state(self) -> Callable[[], EngineState]:
        num_pages = self.memory.num_pages
        if self.model.mesh is None:  # zeros on one device need no program
            return partial(initial_parts, self.program, num_pages)
        return compile_program(
            programs.initial_state.lower(program=self.program, num_pages=num_pages)
        )

    def _make_state(self) -> None:
        self.state: Any = None  # free the old state first: two may not fit
        self.state = self._initial_state()
        self.stages: list[Plan | None] = [None] * self.model.num_stages

    @property
    def is_under_way(self) -> bool:
        """Whether a plan dispatched before is still in the pipeline."""
        return any(plan is not None for plan in self.stages[:-1])

    def dispatch(self, plan: Plan) -> tuple[Plan | None, StepOutput]:
        """Start a step and return at once.

        Returns the plan that the step finishes, and its output, which `np.asarray` waits for. In a
        pipeline of S stages that plan entered S - 1 steps ago, or is None if none did.
        """
        self.stages = [plan if plan.rows else None, *self.stages[:-1]]
        largest = max(p.num_tokens if p is not None else 1 for p in self.stages)
        shape = self.shape_for(largest)
        packed = build(plan, shape, self.num_slots)
        return self.stages[-1], self.run_step(shape.num_tokens, packed)

    def admit(self, admission: Admission, extras: SlotExtras | None) -> None:
        """Write a request into its slot, ahead of the step that first runs it."""
        self.run_admit(admission.pack(self.table_width))
        if extras is not None:
            self.run_extras(admission.slot, *extras)

    def run_step(self, bucket: int, packed: np.ndarray) -> StepOutput:
        """Run a bucket's step on a plan that `batch.build` has packed."""
        with self.peers.call(Op.STEP, bucket, packed):
            lower = partial(self._lower_step, self.state, self.shape_for(bucket))
            program = self._program(f"step[{bucket}]", lower)
            self.state, output = program(self.weights, self.state, packed)
        return output

    def run_admit(self, packed: np.ndarray) -> None:
        """Write a packed `Admission` into its slot."""
        with self.peers.call(Op.ADMIT, 0, packed):
            program = self._program("admit", self._lower_admit)
            self.state = program(self.state, packed)

    def run_extras(self, slot: int, *extras: np.ndarray) -> None:
        """Write the arrays of a `SlotExtras` into a slot."""
        with self.peers.call(Op.EXTRAS, slot, *extras):
            program = self._program("admit_extras", self._lower_extras)
            self.state = program(self.state, np.int32(slot), SlotExtras(*extras))

    def _program(self, name: str, lower: Callable[[], Any]) -> Any:
        """The compiled program of that name, which is compiled now if warm-up left it out."""
        if name not in self._programs:
            if self._is_warm:
                self.num_late_compiles += 1
                logging.warning("%s is compiled after warm-up: requests wait for it", name)
            started = time.perf_counter()
            self._programs[name] = compile_program(lower())
            self.compile_seconds += time.perf_counter() - started
            programs.clear_jit_caches()
        return self._programs[name]

    def _lower_admit(self) -> Any:
        packed = packed_admission(self.table_width)
        return programs.admit.lower(self.state, packed, program=self.program)

    def _lower_extras(self) -> Any:
        one_slot = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        extras = jax.tree.map(one_slot, self.state.sampling.extras)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        return programs.admit_extras.lower(self.state, slot, extras, program=self.program)

    def _lower_step(self, state: EngineState, shape: StepShape) -> Any:
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        return programs.step.lower(self.weights, state, packed, program=self.program, shape=shape)

    def _plan_memory(self) -> MemoryPlan:
        """Plan the pages of one device; all devices have as many."""
        cache, mesh = self.config.cache, self.model.mesh
        limit = device_limit(jax.local_devices()[0] if mesh is None else mesh.local_devices[0])
        return plan_pages(
            cache,
            weight_bytes=sum(map(bytes_per_device, jax.tree.leaves(self.weights))),
            temporary_bytes=0 if limit is None else self._temporary_bytes(),
            page_bytes=self.program.page_bytes,
            min_tokens=2,
            max_tokens=self.num_slots * self.max_model_len,
            limit=limit,
            num_on_host=self.config.mesh.num_devices // self.model.peers.num_processes,
        )

    def _temporary_bytes(self) -> int:
        """The largest step's temporaries, as the compiler counts them, with a pool of one page."""
        state = self.program.abstract_state(1)
        compiled = compile_program(self._lower_step(state, self.program.sizes.largest))
        analysis = compiled.memory_analysis()
        return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
