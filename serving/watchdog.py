"""The watchdog: a thread that notices when the engine has stopped working.

There are two signs: a step that began more than `limit_s` ago and has not returned, and an engine
thread that has ended. The watchdog reports the first sign, once; what to do about it is up to the
caller.

Without warm-up (`warm_up=false`) a step may compile a program, which takes minutes, so that the
limit is at least `COMPILE_STEP_S`. With warm-up every program exists before the first request, and
the configured limit applies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jaxinfer.serving.loop import EngineLoop

COMPILE_STEP_S = 1800.0  # limit of a step that may compile
CHECKS_PER_LIMIT = 20  # at least one a second


class Watchdog:
    """Watches a started loop; calls `on_failure(reason)` once, in the watchdog's thread.

    With `limit_s` 0 a step may take any time, and only the end of the thread is a failure.
    """

    def __init__(self, loop: EngineLoop, limit_s: float, on_failure: Callable[[str], None]):
        self._loop = loop
        self._limit_s = limit_s
        if limit_s and not loop.engine.config.warm_up:
            self._limit_s = max(limit_s, COMPILE_STEP_S)
        self._on_failure = on_failure
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def limit_s(self) -> float:
        """Seconds that a step may take; 0: no limit."""
        return self._limit_s

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching, before the engine's thread is ended on purpose. For any thread."""
        self._is_closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        interval = min(1.0, self._limit_s / CHECKS_PER_LIMIT) if self._limit_s else 1.0
        while not self._is_closed.wait(interval):
            reason = self._failure()
            if reason is not None and not self._is_closed.is_set():
                self._on_failure(reason)
                return

    def _failure(self) -> str | None:
        started = self._loop.step_started
        if not self._loop.is_alive:
            return "the engine's thread has ended"
        if started is not None and self._limit_s:
            seconds = time.monotonic() - started
            if seconds > self._limit_s:
                return (
                    f"a step has not returned for {seconds:.1f} s, longer than serving.watchdog_s "
                    f"allows ({self._limit_s:g} s)"
                )
        return None
