"""The request log: one line of JSON a request, with texts only if configured."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time

import pytest

from jaxinfer import Engine, SamplingParams
from jaxinfer.serving.config import ServingConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import Chat, Delta, GenerationRequest
from jaxinfer.serving.request_log import (
    LOGGER,
    MAX_TEXT,
    request_log_observer,
    short_params,
    write_request_log,
)
from jaxinfer.serving.stream import Stream
from tests.support.tiny_server import tiny_engine, tiny_service


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


@pytest.fixture
def log():
    """The written lines; the logger is restored afterwards."""
    logger = logging.getLogger(LOGGER)
    before = list(logger.handlers), logger.level, logger.propagate
    out = io.StringIO()
    write_request_log(out)
    yield out
    logger.handlers[:], logger.level, logger.propagate = before


def entries(log: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            await coroutine

    asyncio.run(bounded())


def ended(request: GenerationRequest, *deltas: Delta, error: ServiceError | None = None, **config):
    """Log a request without an engine."""
    observer = request_log_observer(ServingConfig(**config))
    request_id = request.request_id or "some-id"
    deadline = time.monotonic() + 9
    stream = Stream(request, request_id, [1, 2], deadline, on_cancel=lambda stream: None)
    for delta in deltas:
        observer.on_delta(stream, delta)
    stream.error = error
    observer.on_end(stream)


def test_request_is_one_log_line_with_usage_and_timing(engine, log):
    async def main():
        observer = request_log_observer(ServingConfig())
        params = SamplingParams(temperature=0.5, max_tokens=9, ignore_eos=True, n=2, seed=3)
        async with tiny_service(engine, observers=(observer,)) as service:
            request = GenerationRequest(
                "a prompt", params, protocol="http", user="ada", request_id="mine"
            )
            result = await (await service.generate(request)).collect()
        [entry] = entries(log)
        assert list(entry)[:4] == ["time", "id", "protocol", "user"]
        assert (entry["id"], entry["protocol"], entry["user"]) == ("mine", "http", "ada")
        assert entry["prompt_tokens"] == 8 and entry["output_tokens"] == 18 and entry["n"] == 2
        assert entry["finish_reasons"] == ["length", "length"] and "error" not in entry
        for name in ("queue_s", "first_token_s", "total_s"):
            assert entry[name] == pytest.approx(getattr(result.timing, name), abs=1e-6)
        changed = {"temperature": 0.5, "seed": 3, "max_tokens": 9, "ignore_eos": True}
        assert entry["params"] == changed
        assert entry["time"].endswith("Z") and "prompt" not in entry and "outputs" not in entry

    run(main())


def test_failed_request_logs_its_error(engine, log):
    async def main():
        observer = request_log_observer(ServingConfig())
        async with tiny_service(engine, observers=(observer,)) as service:
            stream = await service.generate(GenerationRequest("a prompt", SamplingParams()))
            stream.cancel()
            with pytest.raises(ServiceError):
                await stream.collect()
        [entry] = entries(log)
        assert entry["error"] == "cancelled" and "was cancelled" in entry["message"]
        assert entry["finish_reasons"] == [] and entry["first_token_s"] is None

    run(main())


def test_prompt_and_output_are_logged_only_if_configured(log):
    params = SamplingParams(stop=("END",), bad_words=["fie"])
    request = GenerationRequest("the prompt", params)
    deltas = (Delta(0, "an out", [5], [], None), Delta(0, "put", [6], [], None))
    ended(request, *deltas)
    assert not any(w in log.getvalue() for w in ("the prompt", "an out", "END", "fie"))
    ended(request, *deltas, log_prompts=True)
    entry = entries(log)[1]
    assert entry["prompt"] == "the prompt" and entry["outputs"] == ["an output"]
    chat = GenerationRequest(Chat([{"role": "user", "content": "hi"}]), params)
    ended(chat, log_prompts=True)
    assert json.loads(entries(log)[2]["prompt"]) == [{"role": "user", "content": "hi"}]
    ended(GenerationRequest([7, 8], params), log_prompts=True)
    assert entries(log)[3]["prompt"] == "[7,8]"


def test_logged_texts_are_bounded(log):
    long = "x" * 10**6
    request = GenerationRequest(long, SamplingParams(), request_id=long, user=long)
    deltas = [Delta(0, "y" * 100, [5], [], None) for _ in range(1000)]
    ended(request, *deltas, error=ServiceError(ErrorKind.INTERNAL, long), log_prompts=True)
    ended(GenerationRequest([123] * 10**6, SamplingParams()), log_prompts=True)
    ended(GenerationRequest(Chat([{"content": long}]), SamplingParams()), log_prompts=True)
    assert len(entries(log)) == 3
    for line in log.getvalue().splitlines():
        assert len(line) < 2 * MAX_TEXT + 2000
    [first, *_] = entries(log)
    assert len(first["prompt"]) == len(first["outputs"][0]) == MAX_TEXT
    assert first["prompt"].endswith("x...") and first["outputs"][0].endswith("y...")


@pytest.mark.parametrize("bad", ["\n", "\r", "\x00", "\x1b[2J", "\x7f", "\x85", "\u2028", "\ud800"])
def test_clients_cannot_inject_lines_or_control_characters_into_the_log(log, bad):
    text = f'{bad}{{"id": "forged"}}{bad}'
    params = SamplingParams(stop=[text])
    request = GenerationRequest(text, params, request_id=text, user=text)
    error = ServiceError(ErrorKind.INVALID, text)
    ended(request, Delta(0, text, [5], [], None), error=error, log_prompts=True)
    line = log.getvalue()
    assert line.endswith("\n") and line[:-1].isprintable() and line.isascii()
    [entry] = entries(log)
    for name in ("id", "user", "prompt", "message"):
        assert entry[name] == text
    assert entry["outputs"] == [text]


def test_short_params_are_those_that_differ_from_defaults():
    assert short_params(SamplingParams()) == {}
    params = SamplingParams(
        max_tokens=None, logit_bias={1: 2.0, 3: 4.0}, allowed_token_ids=[1], ignore_eos=True
    )
    assert short_params(params) == {
        "max_tokens": None,
        "num_logit_bias": 2,
        "num_allowed_token_ids": 1,
        "ignore_eos": True,
    }


def test_log_state_of_ended_requests_is_released(engine, log):
    async def main():
        observer = request_log_observer(ServingConfig(log_prompts=True))
        kept = observer.on_delta.__self__._samples  # type: ignore[attr-defined]
        async with tiny_service(engine, observers=(observer,)) as service:
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            streams = [await service.generate(GenerationRequest("a", params)) for _ in range(5)]
            streams[0].cancel()
            for stream in streams[1:]:
                await stream.collect()
        assert not kept and len(entries(log)) == 5

    run(main())
