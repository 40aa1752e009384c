"""What an engine counts: plain numbers, for benchmarks and metrics."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class StepStats(NamedTuple):
    """One step: its sizes, and seconds by the host's clock."""

    num_rows: int = 0
    num_tokens: int = 0
    total_s: float = 0.0
    wait_s: float = 0.0  # blocked on the device


@dataclasses.dataclass(slots=True)
class StepCounters:
    """Counts over all steps since the start."""

    num_steps: int = 0
    num_computed: int = 0  # tokens that steps have run through the model, without padding
    num_generated: int = 0  # tokens handed out
    last_step: StepStats = dataclasses.field(default_factory=StepStats)

    def record(self, step: StepStats) -> None:
        self.num_steps += 1
        self.num_computed += step.num_tokens
        self.last_step = step


class EngineStats(NamedTuple):
    """A snapshot of an engine. Fields that are not marked as current count since the start."""

    num_running: int  # current
    num_waiting: int  # current
    num_pages: int
    num_owned_pages: int  # current
    num_cached_pages: int  # current; a page that is neither owned nor cached is free
    num_steps: int
    num_computed: int  # tokens that steps have run through the model
    num_generated: int  # tokens handed out
    num_shared: int  # tokens that the prefix cache has spared from computing
    num_preemptions: int
    num_compiled: int  # programs
    num_late_compiles: int  # programs compiled after warm-up, for which requests waited
    last_step: StepStats
