"""A server process with a fault, for tests of its shutdown.

    python faulty_server.py FAULT CHECKPOINT key.path=value ...

The fault is patched in here before the server starts: the product has no option for it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from jaxinfer import Engine
from jaxinfer.serving import process
from jaxinfer.serving.config import load_configs
from jaxinfer.serving.loop import EngineLoop

SLOW_STEP_S = 0.02
FOREVER_S = 3600.0
GO = "go"  # the file beside the checkpoint for which `load_waits` waits


def patch_step(fault) -> None:
    """Call `fault(engine)` before each step."""
    step = Engine.step

    def patched(engine: Engine) -> Any:
        fault(engine)
        return step(engine)

    Engine.step = patched  # type: ignore[method-assign]


def slow(engine: Engine) -> None:
    time.sleep(SLOW_STEP_S)


def is_due(engine: Engine, num_requests: int) -> bool:
    """Whether this number of requests run, and all have had output."""
    running = engine.scheduler.running
    return len(running) == num_requests and all(len(r.output_token_ids) > 20 for r in running)


def die(engine: Engine) -> None:
    slow(engine)
    if is_due(engine, 2):
        raise RuntimeError("the device is gone")


def stick(engine: Engine) -> None:
    slow(engine)
    if is_due(engine, 2):
        time.sleep(FOREVER_S)


def freeze(events: list[asyncio.AbstractEventLoop], engine: Engine) -> None:
    """Block both the step and the event loop."""
    slow(engine)
    if is_due(engine, 1):
        events[0].call_soon_threadsafe(time.sleep, FOREVER_S)
        time.sleep(FOREVER_S)


def patch(fault: str, checkpoint: str) -> None:
    process.STOP_S = 2.0
    if fault == "freeze":
        process.KILL_S = 2.0
        events: list[asyncio.AbstractEventLoop] = []
        start = EngineLoop.start

        def patched_start(loop: EngineLoop) -> None:
            events.append(asyncio.get_running_loop())
            start(loop)

        EngineLoop.start = patched_start  # type: ignore[method-assign]
        patch_step(lambda engine: freeze(events, engine))
    elif fault == "load_waits":
        patch_step(slow)
        load = process.load_model

        def patched_load(*args: Any, **kwargs: Any) -> Any:
            loaded = load(*args, **kwargs)
            while not (Path(checkpoint).parent / GO).exists():
                time.sleep(0.01)
            return loaded

        process.load_model = patched_load
    else:
        patch_step({"slow": slow, "die": die, "stick": stick}[fault])


if __name__ == "__main__":
    _, fault, checkpoint, *overrides = sys.argv
    patch(fault, checkpoint)
    sys.exit(process.serve(checkpoint, *load_configs(None, overrides)))
