"""Scheduling policies: the order in which requests are served, and when new ones may join.

`POLICIES` is the registry. Preemption takes the running request that the order puts last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from jaxinfer.engine.request import Request


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    def order(self, request: Request) -> tuple[int, ...]:
        """Sort key: the smallest is served first and preempted last."""
        ...

    def may_admit(self, num_running: int) -> bool:
        """Whether a waiting request may join now."""
        ...

    def admitted(self) -> None:
        """A waiting request has joined."""
        ...

    def planned(self, num_waiting: int) -> None:
        """A step has been planned, and `num_waiting` requests are still waiting."""
        ...


class FirstCome:
    """Continuous batching in order of arrival."""

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs

    def order(self, request: Request) -> tuple[int, ...]:
        return (request.rank.arrival,)

    def may_admit(self, num_running: int) -> bool:
        return True

    def admitted(self) -> None:
        pass

    def planned(self, num_waiting: int) -> None:
        pass


class Priority(FirstCome):
    """Continuous batching by `priority` (smaller first), then arrival."""

    def order(self, request: Request) -> tuple[int, ...]:
        return request.rank


class Static(FirstCome):
    """Static batching, the baseline: a batch fills up, closes, and runs to its last request's end.

    It closes with `max_num_seqs` requests, or when none is left waiting.
    """

    def __init__(self, max_num_seqs: int):
        super().__init__(max_num_seqs)
        self._room = max_num_seqs

    def may_admit(self, num_running: int) -> bool:
        if num_running == 0:
            self._room = self.max_num_seqs
        return self._room > 0

    def admitted(self) -> None:
        self._room -= 1

    def planned(self, num_waiting: int) -> None:
        if num_waiting == 0:
            self._room = 0


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "first_come": FirstCome,
    "priority": Priority,
    "static": Static,
}
