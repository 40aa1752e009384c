"""Observers of the engine loop: metrics, the request log and traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from absl import logging

from jaxinfer.engine.stats import EngineStats
from jaxinfer.serving.generation import Delta
from jaxinfer.serving.stream import Stream


@dataclasses.dataclass(frozen=True)
class Observer:
    """Callbacks in the event loop's thread. `on_delta` runs once a token and must be fast."""

    on_step: Callable[[EngineStats], None] = lambda stats: None
    on_delta: Callable[[Stream, Delta], None] = lambda stream, delta: None
    on_end: Callable[[Stream], None] = lambda stream: None


class Observers:
    """Calls all observers. An exception of one is logged and does not affect the requests."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = tuple(observers)

    def step(self, stats: EngineStats) -> None:
        for observer in self._observers:
            _call(observer.on_step, stats)

    def delta(self, stream: Stream, delta: Delta) -> None:
        for observer in self._observers:
            _call(observer.on_delta, stream, delta)

    def end(self, stream: Stream) -> None:
        for observer in self._observers:
            _call(observer.on_end, stream)


def _call(function: Callable[..., None], *args: object) -> None:
    try:
        function(*args)
    except Exception:
        logging.exception("an observer of the engine's loop failed")
