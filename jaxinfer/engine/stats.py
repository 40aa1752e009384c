"""What an engine counts: plain numbers, for benches and metrics."""

from __future__ import annotations

from typing import NamedTuple


class StepStats(NamedTuple):
    """Of one step: sizes, and seconds by the host's clock."""

    num_rows: int = 0
    num_tokens: int = 0
    total_s: float = 0.0
    wait_s: float = 0.0  # blocked on the device


class EngineStats(NamedTuple):
    """A snapshot of an engine. What is not said to be current counts since the start."""

    num_running: int  # current
    num_waiting: int  # current
    num_pages: int
    num_owned_pages: int  # current
    num_cached_pages: int  # current; neither owned nor cached: free
    num_steps: int
    num_computed: int  # tokens that steps have run through the model
    num_generated: int  # tokens handed out
    num_shared: int  # tokens that the prefix cache has spared from computing
    num_preemptions: int
    num_compiled: int  # programs
    num_late_compiles: int  # of those, after warm-up: requests waited for them
    last_step: StepStats
