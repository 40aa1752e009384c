"""The Python client of the gRPC server, sync and async, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

import jaxinfer.serving
from jaxinfer import Engine, FinishReason, SamplingParams
from jaxinfer.serving import AsyncClient, Client, RpcError
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.client_request import ClientTls
from jaxinfer.serving.config import ServingConfig, TlsConfig
from jaxinfer.serving.generation import Chat, Delta, GenerationRequest
from jaxinfer.serving.health import Health, State
from tests.support.certificates import make_authority, make_signed
from tests.support.grpc_harness import GrpcHarness, config, grpc_harness, make_request, run
from tests.support.tiny_server import Brake, tiny_engine

CODES = grpc.StatusCode
GREEDY: Any = {"temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "hello"}]


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


class Either:
    """Calls either client in the same way; each method returns what the client's does."""

    def __init__(self, client: Any):
        self.client = client

    async def call(self, name: str, *args: Any, **named: Any) -> Any:
        if isinstance(self.client, AsyncClient):
            return await getattr(self.client, name)(*args, **named)
        return await asyncio.to_thread(getattr(self.client, name), *args, **named)

    async def deltas(self, *args: Any, **named: Any) -> list[Any]:
        if isinstance(self.client, AsyncClient):
            return [delta async for delta in self.client.generate(*args, **named)]
        return await asyncio.to_thread(lambda: list(self.client.generate(*args, **named)))


@contextlib.asynccontextmanager
async def either(kind: type, target: str, **named: Any) -> AsyncIterator[Either]:
    client = kind(target, **named)
    try:
        yield Either(client)
    finally:
        closing = client.close()
        if inspect.isawaitable(closing):
            await closing


both = pytest.mark.parametrize("kind", [Client, AsyncClient])


@both
def test_client_returns_the_services_output_streamed_or_whole(engine, kind):
    async def main():
        async with grpc_harness(engine) as harness, either(kind, harness.target) as client:
            params = SamplingParams(**GREEDY, max_tokens=20, logprobs=2, prompt_logprobs=1)
            stream = await harness.service.generate(GenerationRequest("né 汉字", params))
            expected = await stream.collect()
            named = {**GREEDY, "max_tokens": 20, "logprobs": 2, "prompt_logprobs": 1}
            result = await client.call("complete", "né 汉字", **named)
            assert result.samples == expected.samples
            assert result.prompt_logprobs == expected.prompt_logprobs
            assert result.usage.output_tokens == 20
            assert 0 <= result.timing.first_token_s <= result.timing.total_s

            first, *others = await client.deltas("né 汉字", **named)
            for delta in others:
                first = Delta.joined([first, delta])
            assert [first] == expected.samples
            assert isinstance(first.finish_reason, FinishReason)

    run(main())


@both
def test_prompt_is_text_or_token_ids_or_messages(engine, kind):
    async def main():
        async with grpc_harness(engine) as harness, either(kind, harness.target) as client:
            ids = await client.call("tokenize", "a prompt")
            assert ids == await harness.service.tokenize("a prompt")
            assert "a prompt" in await client.call("detokenize", ids)
            bare = await client.call("tokenize", "a prompt", add_special_tokens=False)
            assert bare == await harness.service.tokenize("a prompt", add_special_tokens=False)
            chat_ids = await client.call("tokenize", messages=CHAT)
            assert chat_ids == await harness.service.tokenize(Chat(CHAT))

            by_text = await client.call("complete", "a prompt", **GREEDY, max_tokens=8)
            by_ids = await client.call("complete", token_ids=ids, **GREEDY, max_tokens=8)
            assert by_text.samples == by_ids.samples
            by_chat = await client.call("complete", messages=CHAT, **GREEDY, max_tokens=8)
            by_ids = await client.call("complete", token_ids=chat_ids, **GREEDY, max_tokens=8)
            assert by_chat.samples == by_ids.samples

    run(main())


@both
def test_client_reads_model_stats_and_health(engine, kind):
    async def main():
        health = Health()
        async with (
            grpc_harness(engine, health=health) as harness,
            either(kind, harness.target) as client,
        ):
            assert await client.call("model") == harness.service.model
            assert await client.call("stats") == harness.service.stats
            assert await client.call("health") is False
            health.set(State.SERVING)
            await asyncio.sleep(0)
            assert await client.call("health") is True
            assert await client.call("health", "jaxinfer.v1.Inference") is True
            with pytest.raises(RpcError) as caught:
                await client.call("health", "another")
            assert caught.value.code is CODES.NOT_FOUND

    run(main())


@both
def test_error_has_code_text_and_field(engine, kind):
    async def main():
        async with grpc_harness(engine) as harness, either(kind, harness.target) as client:
            for call in (client.call("complete", "x", top_p=2.0), client.deltas("x", top_p=2.0)):
                with pytest.raises(RpcError, match=r"INVALID_ARGUMENT: .*top_p=2.0") as caught:
                    await call
                error = caught.value
                assert error.code is CODES.INVALID_ARGUMENT and error.field == "top_p"
                assert "top_p=2.0" in error.message and error.retry_after_s is None
            with pytest.raises(RpcError) as caught:
                await client.call("complete", "x", model="other")
            assert caught.value.code is CODES.NOT_FOUND and caught.value.field == "model"

    run(main())


@both
def test_overloaded_error_has_a_retry_delay(engine, brake, kind):
    async def main():
        limits = config(max_waiting=0)
        async with grpc_harness(engine, limits) as harness, either(kind, harness.target) as client:
            brake.hold()
            calls = [harness.stub.Generate(make_request()) for _ in range(4)]
            for call in calls:
                await call.read()
            with pytest.raises(RpcError) as caught:
                await client.call("complete", "x")
            assert caught.value.code is CODES.RESOURCE_EXHAUSTED
            assert caught.value.retry_after_s == 1.0 and caught.value.field is None
            for call in calls:
                call.cancel()
            brake.release()

    run(main())


@both
def test_client_timeout_is_the_calls_deadline(engine, brake, kind):
    async def main():
        async with (
            grpc_harness(engine) as harness,
            either(kind, harness.target, timeout_s=0.2) as client,
        ):
            brake.hold()
            calls = [
                client.call("complete", "x"),
                client.deltas("x"),
                client.call("complete", "x", timeout_s=0.1),
            ]
            for call in calls:
                with pytest.raises(RpcError) as caught:
                    await call
                assert caught.value.code is CODES.DEADLINE_EXCEEDED
            brake.release()
            answer = await client.call("complete", "x", **GREEDY, max_tokens=4, timeout_s=30.0)
            assert answer.usage.output_tokens == 4

    run(main())


@both
def test_missing_server_is_unavailable(kind):
    async def main():
        async with either(kind, "127.0.0.1:1", timeout_s=20.0) as client:
            with pytest.raises(RpcError) as caught:
                await client.call("complete", "x")
            assert caught.value.code is CODES.UNAVAILABLE

    run(main())


@both
def test_client_with_a_key_is_accepted(engine, kind):
    keys = ApiKeys([("ann", "key-of-ann-1")])

    async def main():
        async with grpc_harness(engine, keys=keys) as harness:
            async with either(kind, harness.target, api_key="key-of-ann-1") as client:
                assert (await client.call("model")).name == "tiny"
                assert await client.deltas("x", **GREEDY, max_tokens=2)
            for key in (None, "key-of-bob-1"):
                async with either(kind, harness.target, api_key=key) as client:
                    assert await client.call("health") is True
                    for call in (client.call("model"), client.deltas("x")):
                        with pytest.raises(RpcError) as caught:
                            await call
                        assert caught.value.code is CODES.UNAUTHENTICATED

    run(main())


@both
def test_client_with_certificates_is_accepted(engine, kind, tmp_path):
    authority = make_authority(tmp_path, "authority")
    server = make_signed(tmp_path, "server", authority)
    own = make_signed(tmp_path, "client", authority)
    tls = TlsConfig(server.certificate, server.key, authority.certificate)

    async def main():
        async with grpc_harness(engine, ServingConfig(grpc_port=0, tls=tls)) as harness:
            shown = ClientTls(authority.certificate, own.certificate, own.key)
            async with either(kind, harness.target, tls=shown, timeout_s=20.0) as client:
                assert (await client.call("model")).name == "tiny"
            bare = ClientTls(authority.certificate)
            async with either(kind, harness.target, tls=bare, timeout_s=20.0) as client:
                with pytest.raises(RpcError) as caught:
                    await client.call("model")
                assert caught.value.code is CODES.UNAVAILABLE

    run(main())
    with pytest.raises(ValueError, match="belong together"):
        kind("127.0.0.1:1", tls=ClientTls(certificate=own.certificate))


async def is_free(harness: GrpcHarness, engine: Engine) -> None:
    while engine.num_requests or engine.pool.num_owned or harness.service.loop.num_streams:
        await asyncio.sleep(0.001)


def test_leaving_the_loop_cancels_the_request(engine, brake):
    def leave(target: str, how: Callable[[], None]) -> None:
        with Client(target) as client:
            answer = client.generate("x", **GREEDY, max_tokens=400)
            with contextlib.suppress(KeyError):
                for delta in answer:
                    assert answer.request_id and answer.usage is None and not delta.finish_reason
                    how()
                    break
            is_left.set()
            may_close.wait(30)  # not the closing of the channel is what ends it

    def fail() -> None:
        raise KeyError

    async def main():
        brake.seconds = 0.01
        async with grpc_harness(engine) as harness:
            for how in (lambda: None, fail):
                is_left.clear()
                may_close.clear()
                thread = asyncio.create_task(asyncio.to_thread(leave, harness.target, how))
                await asyncio.to_thread(is_left.wait, 30)
                await is_free(harness, engine)
                may_close.set()
                await thread

    is_left, may_close = threading.Event(), threading.Event()
    run(main())


def test_leaving_the_asynchronous_loop_cancels_the_request(engine, brake):
    async def main():
        brake.seconds = 0.01
        async with grpc_harness(engine) as harness, AsyncClient(harness.target) as client:
            answer = client.generate("x", **GREEDY, max_tokens=400)
            async for delta in answer:
                assert answer.request_id and answer.usage is None and not delta.finish_reason
                break
            await is_free(harness, engine)

            task = asyncio.create_task(client.complete("x", **GREEDY, max_tokens=400))
            while not engine.pool.num_owned:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await is_free(harness, engine)

    run(main())


def test_stream_can_be_cancelled_from_elsewhere(engine, brake):
    async def read(answer) -> None:
        async for _ in answer:
            is_under_way.set()

    async def main():
        brake.seconds = 0.01
        async with grpc_harness(engine) as harness:
            async with AsyncClient(harness.target) as client:
                answer = client.generate("x", **GREEDY, max_tokens=400)
                task = asyncio.create_task(read(answer))
                await is_under_way.wait()
                answer.cancel()
                with pytest.raises(RpcError) as caught:
                    await task
                assert caught.value.code is CODES.CANCELLED
                await is_free(harness, engine)
            with Client(harness.target) as client:
                answer = client.generate("x", **GREEDY, max_tokens=400)
                deltas = iter(answer)
                await asyncio.to_thread(next, deltas)
                answer.cancel()
                with pytest.raises(RpcError) as caught:
                    await asyncio.to_thread(list, deltas)
                assert caught.value.code is CODES.CANCELLED
                await is_free(harness, engine)

    is_under_way = asyncio.Event()
    run(main())


def test_finished_stream_has_usage_and_timing(engine):
    async def main():
        async with grpc_harness(engine) as harness, AsyncClient(harness.target) as client:
            answer = client.generate("x", **GREEDY, max_tokens=4, n=2, request_id="mine")
            deltas = [delta async for delta in answer]
            assert answer.request_id == "mine" and answer.prompt_logprobs is None
            assert answer.usage is not None and answer.usage.output_tokens == 8
            assert answer.timing is not None and answer.timing.total_s
            assert {delta.index for delta in deltas} == {0, 1}
            answer.cancel()  # of no effect

    run(main())


def test_unsendable_options_are_refused_before_the_call():
    with Client("127.0.0.1:1") as client:
        for call in (client.generate, client.complete):
            with pytest.raises(TypeError, match="one of prompt, token_ids and messages"):
                call()
            with pytest.raises(TypeError, match="one of prompt, token_ids and messages"):
                call("x", token_ids=[1])
            with pytest.raises(TypeError, match="temprature"):
                call("x", temprature=1.0)  # type: ignore[call-arg]
            with pytest.raises(ValueError, match="priority="):
                call("x", priority=2**70)
            with pytest.raises(TypeError, match="messages: name"):
                call(messages=[{"role": "user", "content": "x", "name": "Ann"}])
        with pytest.raises(TypeError, match="one of text and messages"):
            client.tokenize()


def test_both_clients_have_the_same_methods_with_the_same_parameters():
    def methods(kind: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: list(inspect.signature(function).parameters)
            for name, function in functions
            if not name.startswith("_") or name == "__init__"
        }

    assert methods(Client) == methods(AsyncClient)


def test_package_exports_only_the_clients():
    assert jaxinfer.serving.Client is Client and set(jaxinfer.serving.__all__) >= {"AsyncClient"}
    with pytest.raises(AttributeError, match="Clinet"):
        _ = jaxinfer.serving.Clinet  # type: ignore[attr-defined]
