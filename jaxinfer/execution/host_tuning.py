"""Settings of the host for a process that serves one model until it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import jax

YOUNG_OBJECTS = 50_000  # net allocations between two collections of the young generation
COMPUTE_NICENESS = 5  # gives a thread a third of the usual weight


def tune_gc() -> None:
    """Collect garbage rarely, and exclude the objects that exist now from collection.

    A step of many rows creates about a thousand small objects, which reference counts free. With
    the default threshold (700 objects) that is one collection in every step, and every hundredth
    one walks all objects that loading and compiling left behind: a pause in every stream. Call this
    once, when the engine is warm, in a process that makes no further engines: reference cycles
    among the frozen objects are never freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def lower_compute_priority() -> None:
    """On a CPU, let the threads that compute yield to those that serve clients.

    XLA keeps every core busy for a whole step; without this, a refusal, a probe or a token's bytes
    wait for milliseconds behind it. Lowers the priority of every thread but the calling one, so
    call it when the engine is warm and before other threads are started. Does nothing on an
    accelerator, or where threads have no priorities of their own (only Linux has them).
    """
    tasks = Path("/proc/self/task")
    if jax.default_backend() != "cpu" or not tasks.is_dir():
        return
    for task in tasks.iterdir():
        if int(task.name) != threading.get_native_id():
            with contextlib.suppress(OSError):  # the thread has just ended
                os.setpriority(os.PRIO_PROCESS, int(task.name), COMPUTE_NICENESS)
