"""Whether the server is up and whether it takes requests: one state, for probes and both doors."""

from __future__ import annotations

import enum
from collections.abc import Callable

from absl import logging


class State(enum.Enum):
    """In the order in which a server passes through them."""

    STARTING = 0  # loading, compiling
    SERVING = 1
    DRAINING = 2  # finishing what is under way; nothing new is taken
    DEAD = 3  # the engine is lost; the process is about to end


class Health:
    """A server's state. It only moves forward: a `set` back to an earlier state has no effect, so a
    server that was told to stop while it loaded never becomes ready.

    `set` and `subscribe` are for the event loop's thread; reading is for any.
    """

    def __init__(self):
        self.state = State.STARTING
        self._callbacks: list[Callable[[State], None]] = []

    @property
    def is_live(self) -> bool:
        """False: only a new process helps."""
        return self.state is not State.DEAD

    @property
    def is_ready(self) -> bool:
        """Requests are taken."""
        return self.state is State.SERVING

    def set(self, state: State) -> None:
        """Move forward to `state` and tell who subscribed; a callback that raises is logged."""
        if state.value <= self.state.value:
            return
        self.state = state
        for callback in self._callbacks:
            try:
                callback(state)
            except Exception:
                logging.exception("a subscriber failed on health %s", state.name)

    def subscribe(self, callback: Callable[[State], None]) -> None:
        """Call `callback` with each later state; what the state is now is in `state`."""
        self._callbacks.append(callback)
