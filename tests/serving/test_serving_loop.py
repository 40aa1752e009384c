"""The rules of the loop between asyncio and the engine, with a tiny model."""

from __future__ import annotations

import asyncio

import pytest

from jaxinfer import Engine, SamplingParams
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import GenerationRequest
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.service import Service
from jaxinfer.serving.stream import Stream
from tests.support.tiny_server import Brake, tiny_engine, tiny_service


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


@pytest.fixture
def brake(engine):
    """A brake on the shared engine, for one test."""
    brake = Brake(engine)
    yield brake
    brake.release()
    del engine.step  # the instance's own: the class's is back


def make_request(max_tokens: int = 8, **named) -> GenerationRequest:
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    fields |= named.pop("params", {})
    return GenerationRequest(named.pop("prompt", "a prompt"), SamplingParams(**fields), **named)


async def error_of(service: Service, request: GenerationRequest) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await (await service.generate(request)).collect()
    return caught.value


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            await coroutine

    asyncio.run(bounded())


def test_deltas_join_to_the_engines_output(engine):
    async def main():
        async with tiny_service(engine) as service:
            whole = await (await service.generate(make_request(24))).collect()
            deltas = [d async for d in await service.generate(make_request(24))]
            assert "".join(d.text for d in deltas) == whole.samples[0].text
            ids = [i for d in deltas for i in d.token_ids]
            assert ids == whole.samples[0].token_ids and len(ids) == 24
            assert deltas[-1].finish_reason == "length"
            assert all(d.finish_reason is None for d in deltas[:-1])
            usage, timing = whole.usage, whole.timing
            assert usage.output_tokens == 24 and usage.prompt_tokens == len("a prompt")
            assert timing.queue_s is not None and timing.first_token_s is not None
            assert timing.queue_s <= timing.first_token_s <= (timing.total_s or 0)

    run(main())


def test_samples_of_one_prompt_share_a_stream(engine):
    async def main():
        async with tiny_service(engine) as service:
            params = {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 1, "prompt_logprobs": 0}
            result = await (await service.generate(make_request(6, params=params))).collect()
            assert [s.index for s in result.samples] == [0, 1, 2]
            assert all(len(s.token_ids) == len(s.logprobs) == 6 for s in result.samples)
            assert result.usage.output_tokens == 18
            assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
            assert len(result.prompt_logprobs) == result.usage.prompt_tokens

    run(main())


def test_full_queue_refuses_at_once_and_serves_its_requests(engine, brake):
    async def main():
        limits = LimitsConfig(max_waiting=3)
        async with tiny_service(engine, limits) as service:
            brake.hold()
            streams = [await service.generate(make_request()) for _ in range(4 + 3)]
            refused = await error_of(service, make_request())
            assert refused.kind is ErrorKind.OVERLOADED and refused.retry_after_s
            brake.release()
            for stream in streams:
                assert (await stream.collect()).usage.output_tokens == 8
            await (await service.generate(make_request())).collect()  # there is room again

    run(main())


def test_waiting_prompts_are_bounded_in_tokens(engine, brake):
    async def main():
        async with tiny_service(engine, LimitsConfig(max_waiting_tokens=100)) as service:
            brake.hold()
            first = await service.generate(
                make_request(prompt=[5] * 150)
            )  # alone it may pass the bound
            refused = await error_of(service, make_request(prompt=[5]))
            assert refused.kind is ErrorKind.OVERLOADED
            brake.release()
            await first.collect()
            await (await service.generate(make_request(prompt=[5]))).collect()

    run(main())


def test_more_samples_than_capacity_are_invalid(engine):
    async def main():
        async with tiny_service(engine, LimitsConfig(max_waiting=1)) as service:
            error = await error_of(service, make_request(params={"n": 6, "temperature": 1.0}))
            assert error.kind is ErrorKind.INVALID and error.field == "n"

    run(main())


def test_cancel_frees_pages_within_a_step(engine, brake):
    async def main():
        async with tiny_service(engine) as service:
            stream = await service.generate(make_request(400))
            await anext(stream)
            brake.hold()
            stream.cancel()
            num_steps = engine.stats.num_steps
            brake.release()
            while engine.pool.num_owned:
                await asyncio.sleep(0.001)
            assert engine.stats.num_steps <= num_steps + 2  # the one on its way, and one after
            with pytest.raises(ServiceError, match="cancelled"):
                await anext(stream)
            stream.cancel()  # again: no effect

    run(main())


def test_slow_reader_is_cancelled_without_delaying_others(engine):
    async def main():
        async with tiny_service(engine, LimitsConfig(max_unread_tokens=60)) as service:
            idle = await service.generate(make_request(400))
            other = await (await service.generate(make_request(100))).collect()
            assert other.usage.output_tokens == 100
            with pytest.raises(ServiceError) as caught:
                await idle.collect()
            assert caught.value.kind is ErrorKind.SLOW_READER
            assert idle.num_unread == 0

    run(main())


def test_deadline_before_prefill_costs_no_step(engine, brake):
    async def main():
        async with tiny_service(engine) as service:
            brake.hold()
            running = await service.generate(make_request(4))
            await asyncio.sleep(0.02)  # the thread is in its step
            late = await service.generate(make_request(timeout_s=0.01))
            await asyncio.sleep(0.05)
            computed = engine.stats.num_computed
            brake.release()
            await running.collect()
            with pytest.raises(ServiceError) as caught:
                await late.collect()
            assert caught.value.kind is ErrorKind.DEADLINE
            assert late.timing.queue_s is None
            assert engine.stats.num_computed - computed <= running.usage.prompt_tokens + 4

    run(main())


def test_deadline_ends_a_running_request(engine, brake):
    async def main():
        brake.seconds = 0.01
        async with tiny_service(engine) as service:
            error = await error_of(service, make_request(400, timeout_s=0.2))
            assert error.kind is ErrorKind.DEADLINE

    run(main())


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_timeout_must_be_a_number_of_seconds(engine, timeout_s):
    async def main():
        async with tiny_service(engine) as service:
            error = await error_of(service, make_request(timeout_s=timeout_s))
            assert error.kind is ErrorKind.INVALID and error.field == "timeout_s"

    run(main())


def test_request_id_in_use_is_refused_until_the_request_ends(engine):
    async def main():
        async with tiny_service(engine) as service:
            stream = await service.generate(make_request(request_id="mine"))
            error = await error_of(service, make_request(request_id="mine"))
            assert error.kind is ErrorKind.IN_USE
            await stream.collect()
            await (await service.generate(make_request(request_id="mine"))).collect()
            again = await service.generate(make_request(400, request_id="mine"))
            again.cancel()
            await (await service.generate(make_request(request_id="mine"))).collect()

    run(main())


def test_request_the_engine_refuses_does_not_affect_others(engine):
    async def main():
        async with tiny_service(engine) as service:
            stream = await service.generate(make_request(50))
            bad = [
                (make_request(prompt=[10**6]), "prompt"),
                (make_request(prompt=[]), "prompt"),
                (make_request(prompt="\ud800"), "prompt"),
                (make_request(params={"logit_bias": {10**6: 1.0}}), "logit_bias"),
                (make_request(priority=1), "priority"),
            ]
            for request, field in bad:
                error = await error_of(service, request)
                assert error.kind is ErrorKind.INVALID and error.field == field
            assert (await stream.collect()).usage.output_tokens == 50

    run(main())


def test_drain_finishes_running_requests_and_refuses_new_ones(engine):
    async def main():
        async with tiny_service(engine) as service:
            stream = await service.generate(make_request(50))
            drained = asyncio.create_task(service.loop.drain(30))
            await asyncio.sleep(0)
            assert (await error_of(service, make_request())).kind is ErrorKind.UNAVAILABLE
            assert (await stream.collect()).usage.output_tokens == 50
            assert await drained

    run(main())


def test_drain_cuts_requests_off_at_its_timeout(engine, brake):
    async def main():
        brake.seconds = 0.02
        async with tiny_service(engine) as service:
            stream = await service.generate(make_request(400))
            assert not await service.loop.drain(0.1)
            with pytest.raises(ServiceError) as caught:
                await stream.collect()
            assert caught.value.kind is ErrorKind.UNAVAILABLE

    run(main())


def test_failed_engine_thread_fails_all_requests_with_its_reason():
    engine = tiny_engine()[0]

    async def main():
        errors: list[BaseException] = []
        async with tiny_service(engine) as service:
            service.loop._on_fatal = errors.append
            streams: list[Stream] = [await service.generate(make_request(400)) for _ in range(3)]
            await anext(streams[0])

            def broken():
                raise RuntimeError("the device is gone")

            engine.step = broken  # type: ignore[method-assign]
            for stream in streams:
                with pytest.raises(ServiceError, match="the device is gone") as caught:
                    await stream.collect()
                assert caught.value.kind is ErrorKind.INTERNAL
            assert (await error_of(service, make_request())).kind is ErrorKind.INTERNAL
            assert not service.loop.is_alive and len(errors) == 1

    run(main())


def test_reused_request_id_is_a_new_request(engine, brake):
    """Leftovers of the first request in the engine must not be delivered to the second."""

    async def main():
        brake.seconds = 0.02
        async with tiny_service(engine) as service:
            for _ in range(5):
                first = await service.generate(make_request(400, request_id="X"))
                await anext(first)
                first.cancel()
                again = await (await service.generate(make_request(6, request_id="X"))).collect()
                assert again.usage.output_tokens == 6
                assert again.samples[0].finish_reason == "length"

    run(main())


def test_capacity_is_reserved_while_prompts_are_tokenized(engine, monkeypatch):
    async def main():
        async with tiny_service(engine, LimitsConfig(max_waiting=0)) as service:
            may_go = asyncio.Event()
            tokenize = service.tokenize

            async def slowly(prompt, **named):
                await may_go.wait()
                return await tokenize(prompt, **named)

            monkeypatch.setattr(service, "tokenize", slowly)
            tasks = [asyncio.create_task(service.generate(make_request(4))) for _ in range(4)]
            await asyncio.sleep(0)
            assert (await error_of(service, make_request(4))).kind is ErrorKind.OVERLOADED
            may_go.set()
            for task in tasks:
                assert (await (await task).collect()).usage.output_tokens == 4
            service.loop.check_capacity(4)  # all capacity is released

    run(main())


def test_failing_observer_costs_no_token(engine):
    def broken(*args):
        raise RuntimeError("no")

    async def main():
        observers = (Observer(broken, broken, broken),)
        async with tiny_service(engine, observers=observers) as service:
            result = await (await service.generate(make_request(20))).collect()
            assert result.usage.output_tokens == 20

    run(main())
