"""The runner: weights and state on the device, and the compiled programs that work on them.

Programs are compiled ahead of time, one a bucket, and called as compiled: after warm-up nothing
can compile unseen. A bucket that warm-up left out is compiled when first needed, with a warning,
and counted.
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

from jaxinfer import kv_cache, step
from jaxinfer.batch import StepShape, build, packed_size
from jaxinfer.config import EngineConfig
from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.paged_attention.api import INVARIANT_TILE
from jaxinfer.memory import MemoryPlan, device_limit, plan_pages
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.scheduler import Plan

CPU_SAMPLE_TILE = 8  # rows sampled at once on a CPU: their temporaries stay in its cache


class Runner:
    """Runs plans. `max_len` is the longest request in tokens; it fixes the page table's width."""

    def __init__(
        self, model: FunctionalModel, weights: Weights, config: EngineConfig, max_len: int
    ):
        assert not config.batch_invariant or all(b % INVARIANT_TILE == 0 for b in config.buckets)
        self.model = model
        self.weights = weights
        self.config = config
        self.max_len = max_len
        self.num_slots = config.scheduler.max_rows
        self.num_late_compiles = 0  # programs compiled after warm-up
        self.compile_seconds = 0.0  # tracing and compiling, by the clock
        self._is_warm = False
        self._programs: dict[str, Any] = {}
        on_cpu = platform() == "cpu"
        self.program = step.Program(
            model,
            page_size=config.cache.page_size,
            sample_tile=CPU_SAMPLE_TILE if on_cpu else None,
        )
        kv_cache.check_layout(config.cache.page_size, self.cache_dtype)
        self.memory = self._plan_memory()
        self.state = self._state(self.memory.num_pages)
        self.table_width = self.state.page_table.shape[1]

    @property
    def cache_dtype(self) -> jnp.dtype:
        name = self.config.cache.dtype
        return self.model.numerics.dtype if name == "model" else jnp.dtype(name)

    @property
    def num_compiled(self) -> int:
        return len(self._programs)

    def shape_for(self, num_tokens: int) -> StepShape:
        """The smallest bucket that holds `num_tokens`."""
        bucket = next(b for b in self.config.buckets if b >= num_tokens)
        return StepShape.of_bucket(bucket, self.num_slots, self.config.cache.page_size)

    def warm_up(self, on_progress: Callable[[str], None] = lambda program: None) -> None:
        """Compile every program; `on_progress` gets the name of each one done."""
        shapes = [self.shape_for(bucket) for bucket in reversed(self.config.buckets)]
        programs: dict[str, Callable[[], Any]] = {
            f"step[{shape.num_tokens}]": partial(self._lower_step, self.state, shape)
            for shape in shapes
        }
        programs |= {"admit": self._lower_admit, "admit_extras": self._lower_extras}
        started = time.perf_counter()

        def done(name: str, program: Any) -> None:
            self._programs[name] = program
            on_progress(name)

        step.compile_programs(programs, done)
        step.forget_traces()
        self.compile_seconds = time.perf_counter() - started
        self._is_warm = True

    def reset_state(self) -> None:
        """A fresh state: an interrupted step may have taken the old one with it."""
        del self.state  # first, so that both need not fit
        self.state = self._state(self.memory.num_pages)

    def dispatch(self, plan: Plan) -> step.StepOutput:
        """Start a step and return at once; its output is read by `np.asarray`."""
        shape = self.shape_for(plan.num_tokens)
        packed = build(plan, shape, self.num_slots)
        name = f"step[{shape.num_tokens}]"
        program = self._program(name, partial(self._lower_step, self.state, shape))
        self.state, output = program(self.weights, self.state, packed)
        return output

    def admit(self, admission: step.Admission, extras: step.SlotExtras | None) -> None:
        """Write a request into its slot, ahead of the step that first runs it."""
        program = self._program("admit", self._lower_admit)
        self.state = program(self.state, admission.pack(self.table_width))
        if extras is not None:
            program = self._program("admit_extras", self._lower_extras)
            self.state = program(self.state, np.int32(admission.slot), extras)

    def _program(self, name: str, lower: Callable[[], Any]) -> Any:
        """The compiled program of that name; compiled now, with a warning, if warm-up missed it."""
        if name not in self._programs:
            if self._is_warm:
                self.num_late_compiles += 1
                logging.warning("%s is compiled after warm-up: requests wait for it", name)
            started = time.perf_counter()
            self._programs[name] = step.compile_program(lower())
            self.compile_seconds += time.perf_counter() - started
            step.forget_traces()
        return self._programs[name]

    def _lower_admit(self) -> Any:
        size = 1 + self.table_width + step.NUM_INTS + step.NUM_FLOATS
        return step.admit.lower(self.state, jax.ShapeDtypeStruct((size,), jnp.int32))

    def _lower_extras(self) -> Any:
        one_slot = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        extras = jax.tree.map(one_slot, self.state.sampling.extras)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        return step.admit_extras.lower(self.state, slot, extras)

    def _lower_step(self, state: step.EngineState, shape: StepShape) -> Any:
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        return step.step.lower(self.weights, state, packed, program=self.program, shape=shape)

    def _state(self, num_pages: int) -> step.EngineState:
        return step.initial_state(
            self.model,
            num_pages=num_pages,
            page_size=self.config.cache.page_size,
            num_slots=self.num_slots,
            max_len=self.max_len,
            cache_dtype=self.cache_dtype,
        )

    def _plan_memory(self) -> MemoryPlan:
        cache = self.config.cache
        limit = device_limit(jax.devices()[0])
        page_bytes = kv_cache.page_bytes(
            self.model.config.cache, page_size=cache.page_size, dtype=self.cache_dtype
        )
        return plan_pages(
            cache,
            weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights)),
            temporary_bytes=0 if limit is None else self._temporary_bytes(),
            page_bytes=page_bytes,
            min_tokens=2,
            max_tokens=self.num_slots * self.max_len,
            limit=limit,
        )

    def _temporary_bytes(self) -> int:
        """Of the largest step, by the compiler's account; one page will do, they count apart."""
        state = jax.eval_shape(lambda: self._state(1))
        shape = self.shape_for(self.config.buckets[-1])
        compiled = step.compile_program(self._lower_step(state, shape))
        analysis = compiled.memory_analysis()
        return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
