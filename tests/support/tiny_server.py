"""The service in tests: a real engine with a tiny checkpoint, loop and service."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from jaxinfer import Embedder, Engine
from jaxinfer.build import load_model, need_engine
from jaxinfer.config import from_mapping
from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.options import merge
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.loop import EngineLoop
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.service import Service
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint

MODEL = TinyLlama(num_layers=1, max_positions=4096, seed=1)
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "warm_up": False,
    "bucket_growth": 64,  # few programs: these tests mostly wait for compilation
    "check_every_step": True,
    "cache": {"page_size": 8, "num_pages": 256},
    "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
}


@functools.cache
def checkpoint() -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template, in a folder of its own."""
    folder = tempfile.mkdtemp(prefix="tiny-server-")
    return write_checkpoint(MODEL, Path(folder) / "tiny")


def tiny_engine(options: Mapping[str, Any] | None = None) -> tuple[Engine, GenerationDefaults]:
    """A new engine with `OPTIONS`, overridden by `options`. Its first step compiles (seconds)."""
    config = from_mapping(merge(OPTIONS, options or {}))
    loaded, generation = load_model(checkpoint(), config, show_progress=False)
    [engine] = need_engine(loaded).replicas
    return engine, generation


class Brake:
    """Delays an engine's steps by `seconds` each, and from `hold` until `release` entirely."""

    def __init__(self, engine: Engine | Embedder, seconds: float = 0.0):
        self.seconds = seconds
        self._may_go = threading.Event()
        self._may_go.set()
        self._step = engine.step
        engine.step = self._braked  # type: ignore[method-assign]

    def hold(self) -> None:
        """The next step begins only after `release`."""
        self._may_go.clear()

    def release(self) -> None:
        self._may_go.set()

    def _braked(self) -> Any:
        self._may_go.wait()
        time.sleep(self.seconds)
        return self._step()


@contextlib.asynccontextmanager
async def tiny_service(
    engine: Engine | Embedder,
    limits: LimitsConfig | None = None,
    *,
    observers: tuple[Observer, ...] = (),
    generation: GenerationDefaults | None = None,
    model_name: str | None = "tiny",
) -> AsyncIterator[Service]:
    """A running service around `engine`; checks at the end that no request is left in it.

    A later service may use the engine again, so the tests of a module can share one.
    """
    loop = EngineLoop(engine, limits, observers=observers)
    loop.start()
    try:
        yield Service(engine, loop, generation=generation, model_name=model_name)
    finally:
        brake = getattr(engine.step, "__self__", None)
        if isinstance(brake, Brake):
            brake.release()  # a failed test may have left it on hold
        await loop.stop()
    if loop.failure is None:
        assert engine.num_requests == 0
        if isinstance(engine, Engine):
            assert engine.pool.num_owned == 0
            engine.scheduler.check()
