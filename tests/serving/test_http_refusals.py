"""Refusals of the HTTP server: status, OpenAI's error shape and the field at fault."""

from __future__ import annotations

import json

import pytest

from jaxinfer import Engine
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.http.request_schema import UNSUPPORTED_CHAT
from tests.support.http_harness import error_of, http_harness, run
from tests.support.tiny_server import tiny_engine

MESSAGES = [{"role": "user", "content": "x"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


UNSUPPORTED = {
    "audio": {"voice": "alloy"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content"},
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "service_tier": "priority",
    "store": True,
    "tool_choice": "required",
    "tools": [{"type": "function"}],
    "web_search_options": {},
}


def test_unsupported_openai_field_is_refused_by_name(engine):
    async def main():
        async with http_harness(engine) as harness:
            for name in UNSUPPORTED_CHAT:
                fields = {name: UNSUPPORTED.get(name, "something")}
                error = error_of(await harness.post(CHAT, messages=MESSAGES, **fields))
                assert error["param"] == name and "not supported" in error["message"]
            error = error_of(await harness.post(prompt="x", suffix="y"))
            assert error["param"] == "suffix"
            error = error_of(await harness.post(prompt="x", n=2, best_of=3))
            assert error["param"] == "best_of"
            assert harness.service.loop.stats.num_generated == engine.stats.num_generated

    run(main())


def test_unsupported_field_that_requests_nothing_is_accepted(engine):
    async def main():
        async with http_harness(engine) as harness:
            nothing = {name: value for name, values in UNSUPPORTED_CHAT.items() for value in values}
            fields = {"messages": MESSAGES, "max_tokens": 1, **nothing}
            assert (await harness.post(CHAT, **fields)).status_code == 200
            null = dict.fromkeys(("stop", "n", "seed", "stream", "logit_bias", "user", "model"))
            reply = await harness.post(prompt="x", suffix=None, best_of=1, max_tokens=1, **null)
            assert reply.status_code == 200, reply.text

    run(main())


BAD_FIELDS = [
    ({"unknown": 1}, "unknown"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"top_p": 0}, "top_p"),
    ({"seed": -1}, "seed"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "a lot"}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"unknown": 1}}, "stream_options.unknown"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, None),
    ({"stream": "yes"}, "stream"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"priority": 1}, "priority"),
    ({"timeout_s": -1}, "timeout_s"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": "no"}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": ["far too long a word"]}, "bad_words"),
    ({"user": 1}, "user"),
    ({"request_id": ""}, "request_id"),
]


def test_bad_field_is_refused_by_name_at_both_endpoints(engine):
    async def main():
        async with http_harness(engine) as harness:
            for fields, param in BAD_FIELDS:
                for path, prompt in (
                    ("/v1/completions", {"prompt": "x"}),
                    (CHAT, {"messages": MESSAGES, "max_tokens": 16}),
                ):
                    error = error_of(await harness.post(path, **prompt, **fields))
                    expected = param or "stream_options.include_obfuscation"
                    assert error["param"] == expected, (path, fields, error)
                    assert error["type"] == "invalid_request_error"

    run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": ["x"] * 400}, "prompt"),
    ],
)
def test_bad_prompt_is_refused(engine, fields, param):
    async def main():
        async with http_harness(engine) as harness:
            assert error_of(await harness.post(**fields))["param"] == param

    run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[1].tool_calls",
        ),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": 2}, "logprobs"),
        (
            {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens",
        ),
        ({"messages": MESSAGES, "prompt": "x"}, "prompt"),
    ],
)
def test_bad_conversation_is_refused(engine, fields, param):
    async def main():
        async with http_harness(engine) as harness:
            error = error_of(await harness.post(CHAT, **fields))
            assert error["param"] == param
            if "image_url" in str(fields):
                assert "image_url" in error["message"]

    run(main())


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
    ],
)
def test_bad_token_requests_are_refused(engine, path, fields, param):
    async def main():
        async with http_harness(engine) as harness:
            assert error_of(await harness.post(path, **fields))["param"] == param

    run(main())


def test_body_problems_are_listed_together(engine):
    async def main():
        async with http_harness(engine) as harness:
            error = error_of(await harness.post(prompt="x", n=0, what=1, top_p=7))
            assert all(name in error["message"] for name in ("n:", "what", "top_p:"))

    run(main())


def test_body_must_be_json_of_bounded_size(engine):
    async def main():
        limits = LimitsConfig(max_body_bytes=1000, max_nesting=4)
        async with http_harness(engine, limits) as harness:

            async def post(body, **headers):
                headers = {"content-type": "application/json"} | headers
                return await harness.client.post("/v1/completions", content=body, headers=headers)

            fits = json.dumps({"prompt": "x", "max_tokens": 1}).encode().ljust(1000)
            assert (await post(fits)).status_code == 200
            large = await post(fits + b" ")
            assert "1000" in error_of(large, 413)["message"]

            async def chunks():
                yield fits
                for _ in range(10):
                    yield b" " * 100

            assert error_of(await post(chunks()), 413)
            assert error_of(await post(b'{"prompt": "x", "stop": [[[[[]]]]]}'))
            assert error_of(await post(b"prompt=x", **{"content-type": "text/plain"}), 415)
            assert error_of(await post(fits, **{"content-encoding": "gzip"}), 415)
            assert (await post(fits)).status_code == 200

    run(main())


def test_large_body_is_parsed_outside_the_event_loop(engine):
    async def main():
        async with http_harness(engine) as harness:
            error = error_of(await harness.post(prompt="x" * 2**19))
            assert error["param"] == "prompt" and "context" in error["message"]

    run(main())


def test_keys_guard_the_api_but_not_probes_and_the_page(engine):
    async def main():
        async with http_harness(engine, keys=ApiKeys([("a", "sk-good-one")])) as harness:
            guarded = ["/v1/models", "/v1/models/tiny", "/v1/stats", "/metrics"]
            posts = ["/v1/completions", CHAT, "/tokenize", "/detokenize"]
            for headers in (
                {},
                {"authorization": "Bearer sk-good-on"},
                {"authorization": "Basic x"},
            ):
                for path in guarded:
                    error = error_of(await harness.client.get(path, headers=headers), 401)
                    assert error["code"] == "invalid_api_key"
                for path in posts:
                    reply = await harness.client.post(path, headers=headers, content=b"no json")
                    assert error_of(reply, 401)["type"] == "authentication_error"
                    assert reply.headers["www-authenticate"] == "Bearer"
            for path in ("/health/live", "/health/ready", "/", "/openapi.json"):
                assert (await harness.client.get(path)).status_code == 200
            good = {"authorization": "bearer sk-good-one"}
            for path in guarded:
                assert (await harness.client.get(path, headers=good)).status_code == 200

    run(main())


def test_unknown_paths_and_methods_have_openai_errors(engine):
    async def main():
        async with http_harness(engine) as harness:
            assert "/v1/responses" in error_of(await harness.post("/v1/responses"), 404)["message"]
            for path in ("/v1/models/", "/v1/completions/"):
                error_of(await harness.client.get(path), 404)
            reply = await harness.client.get("/v1/completions")
            assert error_of(reply, 405) and reply.headers["allow"] == "POST"
            reply = await harness.client.options("/v1/completions")
            assert error_of(reply, 405) and "access-control-allow-origin" not in reply.headers

    run(main())


def test_every_response_has_an_id_and_the_security_headers(engine):
    async def main():
        async with http_harness(engine) as harness:
            for path in ("/health/live", "/", "/nothing", "/metrics"):
                headers = (await harness.client.get(path)).headers
                assert headers["x-content-type-options"] == "nosniff"
                assert headers["content-security-policy"].count("default-src 'none'") == 1
                assert len(headers["x-request-id"]) == 32
                assert "server" not in headers
            bad = await harness.client.get("/health/live", headers={"x-request-id": "a b"})
            assert error_of(bad)["param"] == "X-Request-Id"

    run(main())


def test_cors_allows_only_configured_origins(engine):
    async def main():
        origin = "https://app.example"
        asks = {"origin": origin, "access-control-request-method": "POST"}
        async with http_harness(engine, cors_origins=(origin,)) as harness:
            reply = await harness.client.options(CHAT, headers=asks)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == origin
            reply = await harness.client.get("/v1/models", headers={"origin": origin})
            assert reply.headers["access-control-allow-origin"] == origin
            other = asks | {"origin": "https://other.example"}
            reply = await harness.client.options(CHAT, headers=other)
            assert "access-control-allow-origin" not in reply.headers
        async with http_harness(engine) as harness:
            reply = await harness.client.get("/v1/models", headers={"origin": origin})
            assert "access-control-allow-origin" not in reply.headers

    run(main())
