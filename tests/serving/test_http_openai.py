"""OpenAI's own Python client against the server: what it sends, reads and raises."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from jaxinfer import Engine
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig
from tests.support.http_harness import GREEDY, HttpHarness, http_harness, run
from tests.support.tiny_server import Brake, tiny_engine

MESSAGES: Any = [{"role": "user", "content": "the end"}]
EXTRA: Any = {"ignore_eos": True}
TOOLS: Any = [{"type": "function"}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


@pytest.fixture
def brake(engine):
    brake = Brake(engine)
    yield brake
    brake.release()
    del engine.step  # the instance's own: the class's is back


def client_of(harness: HttpHarness, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
    options = {"max_retries": 0, "timeout": 30} | options
    return openai.AsyncOpenAI(base_url=f"{harness.url}/v1", api_key=key, **options)


def test_completions_are_the_same_whole_and_streamed(engine):
    async def main():
        async with http_harness(engine) as harness, client_of(harness) as client:
            fields: Any = {"model": "tiny", "prompt": "the", "max_tokens": 40, "temperature": 0}
            whole = await client.completions.create(**fields, extra_body=EXTRA)
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage is not None and whole.usage.completion_tokens == 40
            assert whole.usage.prompt_tokens == 1 and whole.usage.total_tokens == 41
            usage: Any = {"include_usage": True}
            stream = await client.completions.create(
                **fields, extra_body=EXTRA, stream=True, stream_options=usage
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
            texts = [chunk.choices[0].text for chunk in chunks[:-1]]
            assert "".join(texts) == whole.choices[0].text and len(texts) > 5
            assert all(chunk.usage is None for chunk in chunks[:-1])
            reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
            assert reasons[-1] == "length" and not any(reasons[:-1])

    run(main())


def test_chat_is_the_same_whole_and_streamed(engine):
    async def main():
        async with http_harness(engine) as harness, client_of(harness) as client:
            fields: Any = {
                "model": "tiny",
                "messages": MESSAGES,
                "max_tokens": 30,
                "temperature": 0,
            }
            whole = await client.chat.completions.create(**fields, extra_body=EXTRA)
            message = whole.choices[0].message
            assert message.role == "assistant" and message.content
            stream = await client.chat.completions.create(**fields, extra_body=EXTRA, stream=True)
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert [c.choices[0].delta.role for c in chunks[1:]] == [None] * (len(chunks) - 1)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == message.content
            assert chunks[-1].choices[0].finish_reason == "length"
            assert len({chunk.id for chunk in chunks}) == 1

    run(main())


def test_samples_have_indices_and_a_seed_repeats_them(engine):
    async def main():
        async with http_harness(engine) as harness, client_of(harness) as client:
            fields: Any = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12}
            fields |= {"n": 3, "seed": 7, "extra_body": EXTRA}
            whole = await client.chat.completions.create(**fields)
            texts = [choice.message.content for choice in whole.choices]
            assert [choice.index for choice in whole.choices] == [0, 1, 2]
            assert len(set(texts)) == 3
            streamed = ["", "", ""]
            async for chunk in await client.chat.completions.create(**fields, stream=True):
                choice = chunk.choices[0]
                streamed[choice.index] += choice.delta.content or ""
            assert streamed == texts

    run(main())


def test_chat_logprobs_have_an_entry_a_token(engine):
    async def main():
        async with http_harness(engine) as harness, client_of(harness) as client:
            fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "temperature": 0}
            fields |= {"logprobs": True, "top_logprobs": 3, "extra_body": EXTRA}
            whole = (await client.chat.completions.create(**fields)).choices[0]
            assert whole.logprobs is not None and whole.logprobs.content is not None
            entries = whole.logprobs.content
            assert len(entries) == 9
            for entry in entries:
                assert len(entry.top_logprobs) == 3
                assert entry.top_logprobs[0].token == entry.token  # greedy
                assert entry.logprob == entry.top_logprobs[0].logprob <= 0
            data = bytes(byte for entry in entries for byte in entry.bytes or ())
            assert data.decode("utf-8", "replace") == whole.message.content
            streamed = []
            async for chunk in await client.chat.completions.create(**fields, stream=True):
                logprobs = chunk.choices[0].logprobs
                streamed += (logprobs.content or []) if logprobs else []
            assert streamed == entries

    run(main())


def test_synchronous_openai_client_works(engine):
    async def main():
        async with http_harness(engine) as harness:

            def call() -> tuple[str, list[str]]:
                with openai.OpenAI(base_url=f"{harness.url}/v1", api_key="none") as client:
                    done = client.completions.create(
                        model="tiny", prompt="the", max_tokens=5, temperature=0, extra_body=EXTRA
                    )
                    return done.choices[0].text, [model.id for model in client.models.list()]

            text, models = await asyncio.to_thread(call)
            assert text and models == ["tiny"]

    run(main())


def test_errors_raise_the_openai_clients_classes(engine, brake):
    async def main():
        keys = ApiKeys([("a", "sk-good-one")])
        limits = LimitsConfig(max_waiting=0)
        async with http_harness(engine, limits, keys=keys) as harness:
            async with client_of(harness, "sk-wrong-one") as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
            async with client_of(harness, "sk-good-one") as client:
                with pytest.raises(openai.NotFoundError) as missing:
                    await client.completions.create(model="gpt", prompt="a")
                assert missing.value.code == "model_not_found" and missing.value.param == "model"
                with pytest.raises(openai.BadRequestError) as bad:
                    await client.chat.completions.create(
                        model="tiny", messages=MESSAGES, tools=TOOLS
                    )
                assert bad.value.param == "tools" and bad.value.type == "invalid_request_error"
                with pytest.raises(openai.NotFoundError):
                    await client.models.retrieve("gpt")
                brake.hold()
                fields: Any = {"model": "tiny", "prompt": "a", "max_tokens": 2}
                four = [asyncio.create_task(client.completions.create(**fields)) for _ in range(4)]
                while harness.service.loop.num_streams < 4:
                    await asyncio.sleep(0.005)
                with pytest.raises(openai.RateLimitError) as full:
                    await client.completions.create(**fields)
                assert full.value.response.headers["retry-after"] == "1"
                brake.release()
                await asyncio.gather(*four)

    run(main())


def test_openai_client_retries_after_the_servers_delay(engine, brake):
    async def main():
        limits = LimitsConfig(max_waiting=0)
        async with (
            http_harness(engine, limits) as harness,
            client_of(harness, max_retries=3) as client,
        ):
            brake.hold()
            fields: Any = {"model": "tiny", "prompt": "a", "max_tokens": 2}
            tasks = [asyncio.create_task(client.completions.create(**fields)) for _ in range(5)]
            while harness.metrics.render()[0].count(b'kind="overloaded"') == 0:
                await asyncio.sleep(0.005)
            brake.release()
            assert all(done.choices for done in await asyncio.gather(*tasks))

    run(main())


def test_client_timeout_frees_pages(engine, brake):
    async def main():
        async with http_harness(engine) as harness, client_of(harness, timeout=0.3) as client:
            brake.seconds = 0.05
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(model="tiny", prompt="a", max_tokens=400)
            await harness.idle()

    run(main())


def test_deadline_error_is_not_retried_by_the_openai_client(engine, brake):
    async def main():
        async with http_harness(engine) as harness, client_of(harness, max_retries=2) as client:
            brake.seconds = 0.02
            body = EXTRA | {"timeout_s": 0.1}
            brake.hold()
            asyncio.get_running_loop().call_later(0.3, brake.release)
            with pytest.raises(openai.APIStatusError) as late:
                await client.completions.create(model="tiny", prompt="a", extra_body=body)
            assert late.value.status_code == 408
            with pytest.raises(openai.APIError, match="deadline"):  # in mid-stream
                stream = await client.completions.create(
                    model="tiny", prompt="a", max_tokens=400, stream=True, extra_body=body
                )
                async for _ in stream:
                    pass
            await harness.idle()

    run(main())


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_disconnect_in_mid_stream_frees_pages(engine, brake, path):
    async def main():
        brake.seconds = 0.02
        async with http_harness(engine) as harness, client_of(harness) as client:
            fields: Any = {"model": "tiny", "max_tokens": 400, "extra_body": EXTRA, "stream": True}
            if path == "chat":
                stream = await client.chat.completions.create(messages=MESSAGES, **fields)
            else:
                stream = await client.completions.create(prompt="a", **fields)
            await anext(aiter(stream))
            assert engine.pool.num_owned
            computed = engine.stats.num_computed
            await stream.close()
            await harness.idle()
            assert engine.stats.num_computed - computed < 100  # it did not run to its end

    run(main())


def test_disconnect_before_the_response_frees_pages(engine, brake):
    async def main():
        brake.seconds = 0.02
        async with http_harness(engine) as harness:
            fields = {**GREEDY, "prompt": ["a", "b"], "max_tokens": 400, "n": 2}
            task = asyncio.create_task(harness.post(**fields))
            while engine.num_requests < 4:
                await asyncio.sleep(0.005)
            task.cancel()
            await harness.idle()

    run(main())
