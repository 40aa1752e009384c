"""One service behind both protocols, and clients of both with one interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

import httpx

from jaxinfer import Embedder, Engine
from jaxinfer.serving import AsyncClient, RpcError
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig, ServingConfig
from jaxinfer.serving.errors import ErrorKind
from jaxinfer.serving.grpc_server import build_grpc_server
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.http.app import build_app
from jaxinfer.serving.http.server import build_http_server
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.service import Service
from tests.support.tiny_server import tiny_service

# TOO_LARGE shares its gRPC status with another kind.
KINDS = [kind for kind in ErrorKind if kind is not ErrorKind.TOO_LARGE]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Refused(Exception):
    """The error of a request, in terms common to both protocols."""

    def __init__(self, kind: ErrorKind, field: str | None, retry_after_s: float | None):
        super().__init__(kind)
        self.kind, self.field, self.retry_after_s = kind, field, retry_after_s


class Output(NamedTuple):
    texts: list[str]  # of each sample
    finish_reasons: list[str]
    num_prompt_tokens: int
    num_output_tokens: int


class Caller(Protocol):
    """A client of one protocol; `fields` are those of `SamplingParams` and of the service."""

    async def whole(self, prompt: Any, **fields: Any) -> Output: ...

    def deltas(self, prompt: Any, **fields: Any) -> AsyncIterator[tuple[int, str]]: ...

    async def is_ready(self) -> bool: ...


class HttpCaller:
    """A client of OpenAI's API; a list of messages is sent to the chat endpoint."""

    def __init__(self, url: str, key: str | None):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=60)

    async def whole(self, prompt: Any, **fields: Any) -> Output:
        path, body = self._request(prompt, fields)
        reply = await self.client.post(path, json=body)
        self._check(reply.status_code, reply.headers, reply.content)
        answer = reply.json()
        texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        usage = answer["usage"]
        return Output(texts, reasons, usage["prompt_tokens"], usage["completion_tokens"])

    async def deltas(self, prompt: Any, **fields: Any) -> AsyncIterator[tuple[int, str]]:
        path, body = self._request(prompt, fields)
        async with self.client.stream("POST", path, json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                self._check(reply.status_code, reply.headers, await reply.aread())
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if not line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _refused_by_type(event["error"], None)
                for choice in event["choices"]:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content")
                    yield choice["index"], text or ""

    async def is_ready(self) -> bool:
        return (await self.client.get("/health/ready")).status_code == 200

    @staticmethod
    def _request(prompt: Any, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return "/v1/chat/completions", {"messages": prompt, **fields}
        return "/v1/completions", {"prompt": prompt, **fields}

    @staticmethod
    def _check(status: int, headers: httpx.Headers, body: bytes) -> None:
        if status != 200:
            raise _refused_by_type(json.loads(body)["error"], headers.get("retry-after"))


def _refused_by_type(error: dict[str, Any], retry_after: str | None) -> Refused:
    kind = next(k for k in KINDS if k.openai_type == error["type"])
    return Refused(kind, error["param"], float(retry_after) if retry_after else None)


class GrpcCaller:
    """The project's own gRPC client."""

    def __init__(self, target: str, key: str | None):
        self.client = AsyncClient(target, api_key=key)

    async def whole(self, prompt: Any, **fields: Any) -> Output:
        with self._refusals():
            result = await self.client.complete(**self._request(prompt), **fields)
        reasons = [str(s.finish_reason) for s in result.samples]
        usage = result.usage
        texts = [s.text for s in result.samples]
        return Output(texts, reasons, usage.prompt_tokens, usage.output_tokens)

    async def deltas(self, prompt: Any, **fields: Any) -> AsyncIterator[tuple[int, str]]:
        with self._refusals():
            async for delta in self.client.generate(**self._request(prompt), **fields):
                yield delta.index, delta.text

    async def is_ready(self) -> bool:
        return await self.client.health()

    @staticmethod
    def _request(prompt: Any) -> dict[str, Any]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return {"messages": prompt}
        return {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}

    @staticmethod
    @contextlib.contextmanager
    def _refusals():
        try:
            yield
        except RpcError as error:
            kind = next(k for k in KINDS if k.grpc_status == error.code.name)
            raise Refused(kind, error.field, error.retry_after_s) from None


class BothProtocols(NamedTuple):
    service: Service
    health: Health
    callers: dict[str, Caller]

    async def idle(self) -> None:
        """Wait until no request is unfinished and no page in use."""
        loop = self.service.loop
        while loop.num_streams or loop.engine.has_requests or loop.engine.stats.num_owned_pages:
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def both_protocols(
    engine: Engine | Embedder, *, keys: ApiKeys | None = None, key: str | None = None, **limits: Any
) -> AsyncIterator[BothProtocols]:
    """One service behind both protocols."""
    config = ServingConfig(http_port=0, grpc_port=0, limits=LimitsConfig(**limits))
    health = Health()
    metrics = Metrics(health)
    observers = (metrics.observer,)
    async with tiny_service(engine, config.limits, observers=observers) as service:
        metrics.watch(service.loop, service.model.name)
        health.set(State.SERVING)
        app = build_app(service, config, keys, health, metrics)
        http_server = build_http_server(app, config)
        grpc_server = build_grpc_server(service, config, keys, health, metrics)
        http = HttpCaller(f"http://127.0.0.1:{await http_server.start()}", key)
        rpc = GrpcCaller(f"127.0.0.1:{await grpc_server.start()}", key)
        try:
            yield BothProtocols(service, health, {"http": http, "grpc": rpc})
        finally:
            await http.client.aclose()
            await rpc.client.close()
            await http_server.stop(5)
            await grpc_server.stop(5)
