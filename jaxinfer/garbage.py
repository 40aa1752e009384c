"""Python's garbage collector, set for a process that serves one model until it ends."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 50_000  # allocated net of freed, before the young generation is looked through


def calm_collector() -> None:
    """Collect seldom, and never look again at what exists now.

    A step of many rows makes about a thousand small objects and drops them by reference count. By
    default (700 objects) that is a collection a step, and every hundredth walks all that loading
    and compiling left behind: a pause in everybody's stream. Call it once, when the engine is warm,
    and only where engines are not made again and again: what is frozen in a cycle stays for good.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
