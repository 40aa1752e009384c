"""The state of the server, for probes and for both protocols."""

from __future__ import annotations

import enum
from collections.abc import Callable

from absl import logging


class State(enum.Enum):
    """The states, in the order in which a server passes through them."""

    STARTING = 0  # loading, compiling
    SERVING = 1
    DRAINING = 2  # finishing its requests, accepting no new ones
    DEAD = 3  # the engine is lost; the process is about to end


class Health:
    """The state of a server. It only moves forward: setting an earlier state has no effect, so that
    a server that is told to stop while it loads never becomes ready.

    `set` and `subscribe` are for the event loop's thread; any thread may read.
    """

    def __init__(self):
        self.state = State.STARTING
        self._callbacks: list[Callable[[State], None]] = []

    @property
    def is_live(self) -> bool:
        """False: the process has to be restarted."""
        return self.state is not State.DEAD

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self.state is State.SERVING

    def set(self, state: State) -> None:
        """Move forward to `state` and notify the subscribers; exceptions of theirs are logged."""
        if state.value <= self.state.value:
            return
        self.state = state
        for callback in self._callbacks:
            try:
                callback(state)
            except Exception:
                logging.exception("a subscriber failed at health state %s", state.name)

    def subscribe(self, callback: Callable[[State], None]) -> None:
        """Call `callback` with each later state, but not with the current one."""
        self._callbacks.append(callback)
