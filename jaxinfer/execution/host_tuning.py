"""Settings of the host for a process that serves one model until it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import jax

YOUNG_OBJECTS = 50_000  # allocated net of freed, before the young generation is looked through
COMPUTE_NICENESS = 5  # a third of the weight of a thread that is not nice


def tune_gc() -> None:
    """Collect garbage seldom, and never look again at what exists now.

    A step of many rows makes about a thousand small objects and drops them by reference count. By
    default (700 objects) that is a collection a step, and every hundredth walks all that loading
    and compiling left behind: a pause in everybody's stream. Call it once, when the engine is warm,
    and only where engines are not made again and again: what is frozen in a cycle stays for good.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def lower_compute_priority() -> None:
    """On a CPU, let the threads that compute yield to those that talk to clients.

    XLA keeps every core busy for a whole step; without this, what a client waits for (a refusal, a
    probe, a token's bytes) queues behind it for milliseconds at a time. Makes every thread but the
    calling one nice, so call it when the engine is warm and no other thread is started yet. Linux
    alone has priorities of threads; elsewhere, and on an accelerator, it does nothing.
    """
    tasks = Path("/proc/self/task")
    if jax.default_backend() != "cpu" or not tasks.is_dir():
        return
    for task in tasks.iterdir():
        if int(task.name) != threading.get_native_id():
            with contextlib.suppress(OSError):  # it has just ended
                os.setpriority(os.PRIO_PROCESS, int(task.name), COMPUTE_NICENESS)
