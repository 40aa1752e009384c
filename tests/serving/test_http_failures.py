"""Failures of accepted requests: conflicts, errors in mid-stream, defects."""

from __future__ import annotations

import asyncio
import json

import pytest

from jaxinfer import Engine
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.http.completions import CompletionSerializer
from tests.support.http_harness import GREEDY, error_of, events_of, http_harness, run
from tests.support.tiny_server import Brake, tiny_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


def test_request_id_in_use_is_a_conflict_and_counted(engine):
    async def main():
        brake = Brake(engine)
        try:
            async with http_harness(engine) as harness:
                brake.hold()
                first = asyncio.create_task(harness.complete("x", request_id="mine"))
                while not harness.service.loop.num_streams:
                    await asyncio.sleep(0.005)
                reply = await harness.post(prompt="x", request_id="mine")
                assert error_of(reply, 409)["param"] == "request_id"
                assert reply.headers["x-should-retry"] == "false"
                brake.release()
                await first
                text = (await harness.client.get("/metrics")).text
                line = next(line for line in text.splitlines() if 'kind="in_use"' in line)
                assert 'protocol="http"' in line and line.endswith(" 1.0")
        finally:
            brake.release()
            del engine.step

    run(main())


def test_error_in_mid_stream_is_the_last_event(engine):
    async def main():
        Brake(engine, 0.01)
        try:
            async with http_harness(engine) as harness:
                fields = {**GREEDY, "prompt": "x", "max_tokens": 400, "stream": True}
                async with harness.client.stream("POST", "/v1/completions", json=fields) as reply:
                    lines = reply.aiter_text()
                    text = await anext(lines)
                    (stream,) = harness.service.loop._streams.values()
                    harness.service.loop.end(stream, ServiceError(ErrorKind.INTERNAL, "a test"))
                    text += "".join([part async for part in lines])
                last = json.loads(events_of(text)[-1])
                assert last["error"]["message"] == "a test"
        finally:
            del engine.step

    run(main())


def test_defect_is_logged_and_hidden_from_the_client(engine, caplog, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("secret internals")

    async def main():
        async with http_harness(engine) as harness:
            with monkeypatch.context() as patch:
                patch.setattr(harness.service, "params", broken)
                error = error_of(await harness.post(prompt="x"), 500)
            assert "secret" not in str(error) and "secret internals" in caplog.text
            caplog.clear()
            with monkeypatch.context() as patch:
                patch.setattr(CompletionSerializer, "last_events", broken)
                reply = await harness.post(prompt="x", stream=True)
            *_, last = events_of(reply.text)
            assert json.loads(last)["error"]["type"] == "server_error"
            assert "secret" not in reply.text and "secret internals" in caplog.text

    run(main())
