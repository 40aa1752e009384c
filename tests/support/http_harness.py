"""The HTTP server in tests: the real app and a real uvicorn around a tiny engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx

from jaxinfer import Engine
from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig, ServingConfig
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.http.app import build_app
from jaxinfer.serving.http.server import HttpServer, build_http_server
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.service import Service
from tests.support.tiny_server import tiny_service

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class HttpHarness:
    """A listening server, its parts and a client of it."""

    def __init__(
        self, service: Service, health: Health, metrics: Metrics, server: HttpServer, url: str
    ):
        self.server = server
        self.service = service
        self.health = health
        self.metrics = metrics
        self.url = url
        self.client = httpx.AsyncClient(base_url=url, timeout=90)

    async def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """POST `fields`."""
        return await self.client.post(path, json=fields)

    async def complete(self, prompt: Any = "a prompt", **fields: Any) -> dict[str, Any]:
        """A greedy completion's body."""
        return (await self.post(**{**GREEDY, "prompt": prompt, **fields})).raise_for_status().json()

    async def stream(self, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
        """The events of a greedy stream; it must end with [DONE]."""
        reply = await self.post(path, **{**GREEDY, **fields, "stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
        *events, done = events_of(reply.text)
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    async def idle(self) -> None:
        """Wait until no request is unfinished and no page in use."""
        loop = self.service.loop
        engine = loop.engine
        assert isinstance(engine, Engine)
        while loop.num_streams or engine.has_requests or engine.pool.num_owned:
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def http_harness(
    engine: Engine,
    limits: LimitsConfig | None = None,
    *,
    keys: ApiKeys | None = None,
    generation: GenerationDefaults | None = None,
    **options: Any,
) -> AsyncIterator[HttpHarness]:
    """A server on a free port; checks at the end that no connection, task or request is left."""
    config = ServingConfig(limits=limits or LimitsConfig(), **{"http_port": 0, **options})
    async with tiny_service(engine, config.limits, generation=generation) as service:
        health = Health()
        metrics = Metrics(health)
        metrics.watch(service.loop, service.model.name)
        health.set(State.SERVING)
        server = build_http_server(build_app(service, config, keys, health, metrics), config)
        scheme = "https" if config.tls.certificate else "http"
        url = f"{scheme}://127.0.0.1:{await server.start()}"
        harness = HttpHarness(service, health, metrics, server, url)
        try:
            yield harness
        finally:
            await harness.client.aclose()
            await server.stop(5)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


def run(coroutine: Coroutine[Any, Any, None], timeout_s: float = 120) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await coroutine

    asyncio.run(bounded())


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, str]:
    """The error in a response, after checking its status and shape."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def joined(events: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice of a stream, by index."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def events_of(text: str) -> list[str]:
    """The data of server-sent events."""
    return [block.removeprefix("data: ") for block in text.split("\n\n") if block]
