"""Behaviour that HTTP and gRPC have in common, tested over both protocols of one service.

What is peculiar to a protocol is tested beside it (test_http_*.py, test_grpc_*.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from jaxinfer import Engine
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.errors import ErrorKind
from jaxinfer.serving.generation import GenerationRequest
from jaxinfer.serving.health import State
from tests.support.protocol_harness import GREEDY, Caller, Refused, both_protocols
from tests.support.tiny_server import Brake, tiny_engine

MESSAGES = [{"role": "user", "content": "Grüße, 世界 🙂"}]
KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


@pytest.fixture
def brake(engine):
    brake = Brake(engine)
    yield brake
    brake.release()
    del engine.step  # the instance's own: the class's is back


@pytest.fixture(params=["http", "grpc"])
def protocol(request) -> str:
    return request.param


def run(coroutine) -> None:
    async def bounded():
        async with asyncio.timeout(90):
            await coroutine

    asyncio.run(bounded())


async def refused(caller: Caller, prompt: Any = "a prompt", **fields: Any) -> Refused:
    with pytest.raises(Refused) as whole:
        await caller.whole(prompt, **GREEDY | fields)
    return whole.value


async def joined(caller: Caller, prompt: Any, **fields: Any) -> list[str]:
    texts: dict[int, str] = {}
    async for index, text in caller.deltas(prompt, **fields):
        texts[index] = texts.get(index, "") + text
    return [texts[i] for i in sorted(texts)]


STREAMS: list[tuple[Any, dict[str, Any]]] = [
    ("a prompt", {"max_tokens": 40, **GREEDY}),
    ("Grüße, 世界 🙂", {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}),
    ([5, 6, 7, 8], {"max_tokens": 30, "temperature": 1.5, "seed": 9, "n": 3}),
    (MESSAGES, {"max_tokens": 40, "temperature": 1.0, "seed": 1}),
    ("stop here", {"max_tokens": 200, "temperature": 1.0, "seed": 2, "stop": ["e", "t", "�"]}),
    ("stop here", {"max_tokens": 60, "seed": 4, "stop": ["a"], "include_stop_str_in_output": True}),
    ("specials", {"max_tokens": 60, "seed": 5, "skip_special_tokens": False, "ignore_eos": True}),
]


@pytest.mark.parametrize(("prompt", "fields"), STREAMS)
def test_deltas_join_to_the_whole_text_alike_over_both_protocols(engine, prompt, fields):
    async def main():
        async with both_protocols(engine) as both:
            wholes = [await caller.whole(prompt, **fields) for caller in both.callers.values()]
            assert wholes[0] == wholes[1]
            for caller in both.callers.values():
                assert await joined(caller, prompt, **fields) == wholes[0].texts

    run(main())


def test_protocols_do_not_interfere_with_each_other(engine):
    async def main():
        fields = {"max_tokens": 25, "temperature": 1.0, "ignore_eos": True}
        async with both_protocols(engine) as both:
            callers = [both.callers["http"], both.callers["grpc"]] * 4
            alone = [await callers[0].whole("x", seed=i, **fields) for i in range(8)]
            tasks = [c.whole("x", seed=i, **fields) for i, c in enumerate(callers)]
            assert await asyncio.gather(*tasks) == alone

    run(main())


REFUSALS: list[tuple[dict[str, Any], ErrorKind, str | None]] = [
    ({"temperature": -1}, ErrorKind.INVALID, "temperature"),
    ({"top_p": 0}, ErrorKind.INVALID, "top_p"),
    ({"logit_bias": {10**6: 1}}, ErrorKind.INVALID, "logit_bias"),
    ({"prompt": [10**6]}, ErrorKind.INVALID, "prompt"),
    ({"prompt": []}, ErrorKind.INVALID, "prompt"),
    ({"prompt": [5] * 600}, ErrorKind.INVALID, "prompt"),
    ({"stop": [""]}, ErrorKind.INVALID, "stop"),
    ({"max_tokens": 2**40}, ErrorKind.INVALID, "max_tokens"),
    ({"priority": 3}, ErrorKind.INVALID, "priority"),
    ({"n": 200}, ErrorKind.INVALID, "n"),
    ({"model": "another"}, ErrorKind.NOT_FOUND, "model"),
    ({"stop": ["x" * 2000]}, ErrorKind.INVALID, "stop"),
    ({"bad_words": ["x" * 300]}, ErrorKind.INVALID, "bad_words"),
    ({"prompt_logprobs": 20, "n": 24, "prompt": [5] * 500}, ErrorKind.INVALID, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "kind", "field"), REFUSALS)
def test_unservable_request_is_refused_by_name(engine, protocol, fields, kind, field):
    async def main():
        async with both_protocols(engine) as both:
            caller = both.callers[protocol]
            other = asyncio.create_task(caller.whole("x", max_tokens=30, **GREEDY))
            error = await refused(caller, **{"prompt": "a prompt", **fields})
            assert (error.kind, error.field) == (kind, field)
            assert (await other).num_output_tokens == 30, "another request was disturbed"

    run(main())


def test_full_queue_error_has_a_retry_delay(engine, brake, protocol):
    async def main():
        async with both_protocols(engine, max_waiting=1) as both:
            brake.hold()
            caller = both.callers[protocol]
            tasks = [
                asyncio.create_task(caller.whole("x", max_tokens=4, **GREEDY)) for _ in range(5)
            ]
            while both.service.loop.num_streams < 5:
                await asyncio.sleep(0.002)
            for each in both.callers.values():
                error = await refused(each)
                assert error.kind is ErrorKind.OVERLOADED and error.retry_after_s
            brake.release()
            assert all(a.num_output_tokens == 4 for a in await asyncio.gather(*tasks))

    run(main())


def test_passed_deadline_is_named(engine, brake, protocol):
    async def main():
        brake.seconds = 0.02
        async with both_protocols(engine) as both:
            error = await refused(both.callers[protocol], max_tokens=400, timeout_s=0.2)
            assert error.kind is ErrorKind.DEADLINE
            await both.idle()

    run(main())


def test_request_id_is_used_once_at_a_time(engine, brake, protocol):
    async def main():
        async with both_protocols(engine) as both:
            brake.hold()
            caller = both.callers[protocol]
            first = asyncio.create_task(
                caller.whole("x", max_tokens=4, request_id="mine", **GREEDY)
            )
            while not both.service.loop.num_streams:
                await asyncio.sleep(0.002)
            for each in both.callers.values():  # of the same engine, whichever the protocol
                assert (await refused(each, request_id="mine")).kind is ErrorKind.IN_USE
            brake.release()
            await first
            await caller.whole("x", max_tokens=4, request_id="mine", **GREEDY)

    run(main())


def test_disconnected_client_frees_pages(engine, brake, protocol):
    async def main():
        brake.seconds = 0.005
        async with both_protocols(engine) as both:
            before = engine.stats.num_generated
            source = both.callers[protocol].deltas("x", max_tokens=400, **GREEDY)
            async with contextlib.aclosing(source) as deltas:  # type: ignore[type-var]
                async for _ in deltas:
                    break
            await both.idle()
            assert engine.stats.num_generated - before < 200, "it went on for nobody"

    run(main())


def test_disconnected_waiting_client_is_removed(engine, brake, protocol):
    async def main():
        async with both_protocols(engine) as both:
            brake.hold()
            task = asyncio.create_task(both.callers[protocol].whole("x", max_tokens=400, **GREEDY))
            while not both.service.loop.num_streams:
                await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.wait((task,))
            while both.service.loop.num_streams:
                await asyncio.sleep(0.002)
            brake.release()
            await both.idle()

    run(main())


def test_draining_server_finishes_its_requests_and_refuses_new_ones(engine, brake, protocol):
    async def main():
        brake.seconds = 0.005
        async with both_protocols(engine) as both:
            caller = both.callers[protocol]
            assert await caller.is_ready()
            under_way = asyncio.create_task(caller.whole("x", max_tokens=60, **GREEDY))
            while not both.service.loop.num_streams:
                await asyncio.sleep(0.002)
            both.health.set(State.DRAINING)
            drained = asyncio.create_task(both.service.loop.drain(60))
            await asyncio.sleep(0.01)
            error = await refused(caller)
            assert error.kind is ErrorKind.UNAVAILABLE and error.retry_after_s
            assert not await caller.is_ready()
            assert (await under_way).num_output_tokens == 60
            assert await drained

    run(main())


def test_failed_engine_fails_its_requests_with_its_reason(protocol):
    engine = tiny_engine()[0]

    async def main():
        async with both_protocols(engine) as both:
            caller = both.callers[protocol]
            source = caller.deltas("x", max_tokens=400, **GREEDY)
            await anext(source)

            def broken():
                raise RuntimeError("the device is gone")

            engine.step = broken  # type: ignore[method-assign]
            with pytest.raises(Refused) as caught:
                async for _ in source:
                    pass
            assert caught.value.kind is ErrorKind.INTERNAL
            assert (await refused(caller)).kind is ErrorKind.INTERNAL

    run(main())


@pytest.mark.parametrize("key", [None, "another-key-entirely"])
def test_wrong_key_is_refused(engine, protocol, key):
    async def main():
        keys = ApiKeys([("tests", KEY)])
        async with both_protocols(engine, keys=keys, key=key) as both:
            assert (await refused(both.callers[protocol])).kind is ErrorKind.UNAUTHENTICATED
            assert await both.callers[protocol].is_ready(), "probes have no key"
        async with both_protocols(engine, keys=keys, key=KEY) as both:
            answer = await both.callers[protocol].whole("x", max_tokens=3, **GREEDY)
            assert answer.num_output_tokens == 3

    run(main())


def test_request_records_its_protocol(engine):
    seen: list[GenerationRequest] = []

    async def main():
        async with both_protocols(engine) as both:
            submit = both.service.loop.submit

            def noting(request, token_ids, **named):
                seen.append(request)
                return submit(request, token_ids, **named)

            both.service.loop.submit = noting  # type: ignore[method-assign]
            for caller in both.callers.values():
                await caller.whole("x", max_tokens=2, user="me", **GREEDY)

    run(main())
    assert [(r.protocol, r.user) for r in seen] == [("http", "me"), ("grpc", "me")]


def test_protocols_accept_the_same_roles(engine):
    async def main():
        async with both_protocols(engine) as both:
            say = lambda role: [{"role": role, "content": "hello"}]
            for caller in both.callers.values():
                fields = {"max_tokens": 6, **GREEDY}
                assert await caller.whole(say("developer"), **fields) == await caller.whole(
                    say("system"), **fields
                )
                assert (await refused(caller, say("tool"))).kind is ErrorKind.INVALID

    run(main())
