"""The watchdog: it reports a step that does not return or an ended engine thread, once."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest

from jaxinfer import Engine, SamplingParams
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import GenerationRequest
from jaxinfer.serving.loop import EngineLoop
from jaxinfer.serving.watchdog import COMPILE_STEP_S, Watchdog
from tests.support.tiny_server import Brake, tiny_engine, tiny_service


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = tiny_engine({"warm_up": True})[0]
    return engine


class Told:
    """Run a watchdog and collect its reports."""

    def __init__(self):
        self.reasons: list[str] = []
        self.threads: list[str] = []
        self.has_come = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.threads.append(threading.current_thread().name)
        self.has_come.set()


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            await coroutine

    asyncio.run(bounded())


def make_request(max_tokens: int) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest("a prompt", params)


def test_stuck_step_is_reported_once(engine):
    async def main():
        brake, told = Brake(engine), Told()
        async with tiny_service(engine) as service:
            watchdog = Watchdog(service.loop, 0.2, told)
            watchdog.start()
            brake.hold()
            stream = await service.generate(make_request(4))
            assert await asyncio.to_thread(told.has_come.wait, 30)
            await asyncio.sleep(0.3)
            assert len(told.reasons) == 1 and told.threads == ["watchdog"]
            assert "watchdog_s" in told.reasons[0] and "0.2" in told.reasons[0]
            brake.release()
            assert (await stream.collect()).usage.output_tokens == 4
            watchdog.close()
        del engine.step

    run(main())


def test_steps_and_pauses_within_the_limit_are_not_reported(engine):
    async def main():
        brake, told = Brake(engine), Told()
        async with tiny_service(engine) as service:
            watchdog = Watchdog(service.loop, 0.5, told)
            watchdog.start()
            brake.seconds = 0.05
            await (await service.generate(make_request(20))).collect()  # 1 s of steps
            await asyncio.sleep(0.7)  # idle
            watchdog.close()
        assert not told.reasons
        del engine.step

    run(main())


def test_ended_engine_thread_is_reported():
    broken = tiny_engine({"warm_up": True})[0]

    def fail():
        raise RuntimeError("the device is gone")

    broken.step = fail  # type: ignore[method-assign]

    async def main():
        told = Told()
        async with tiny_service(broken) as service:
            watchdog = Watchdog(service.loop, 0.0, told)  # no limit on steps
            watchdog.start()
            stream = await service.generate(make_request(4))
            with pytest.raises(ServiceError):
                await stream.collect()
            assert await asyncio.to_thread(told.has_come.wait, 30)
            assert told.reasons == ["the engine's thread has ended"]
            watchdog.close()

    run(main())


def test_closed_watchdog_does_not_report_a_shutdown(engine):
    async def main():
        told = Told()
        loop = EngineLoop(engine)
        loop.start()
        watchdog = Watchdog(loop, 0.1, told)
        watchdog.start()
        watchdog.close()
        await loop.stop()
        loop.fail(ServiceError(ErrorKind.INTERNAL, "over"))
        await asyncio.sleep(0.1)
        assert not told.reasons
        assert not [t for t in threading.enumerate() if t.name == "watchdog"]
        watchdog.close()  # again: no effect

    run(main())


def test_compiling_step_has_a_longer_limit(engine):
    cold = EngineLoop(engine)
    cold.engine = Config(dataclasses.replace(engine.config, warm_up=False))  # type: ignore
    assert Watchdog(cold, 2.0, Told()).limit_s == COMPILE_STEP_S
    assert Watchdog(cold, 2 * COMPILE_STEP_S, Told()).limit_s == 2 * COMPILE_STEP_S
    assert Watchdog(cold, 0.0, Told()).limit_s == 0
    assert Watchdog(EngineLoop(engine), 2.0, Told()).limit_s == 2.0


@dataclasses.dataclass
class Config:
    """The part of an engine on which the choice of the limit depends."""

    config: object
