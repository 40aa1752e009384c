"""The gRPC server in tests: a real server on a loopback socket around a tiny engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import pytest

from jaxinfer import Engine
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig, ServingConfig
from jaxinfer.serving.grpc_server import GrpcServer, build_grpc_server
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.protos.jaxinfer.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serving.service import Service
from tests.support.tiny_server import Brake, tiny_service

EOF: Any = vars(grpc.aio)["EOF"]  # absent from the type stubs
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class GrpcHarness:
    """A listening server and a client's channel to it."""

    def __init__(
        self,
        service: Service,
        server: GrpcServer,
        metrics: Metrics,
        channel: grpc.aio.Channel,
        port: int,
    ):
        self.service = service
        self.server = server
        self.metrics = metrics
        self.port = port
        self.target = f"127.0.0.1:{port}"
        self.channel = channel
        self.stub: Any = InferenceStub(channel)


def serving_health() -> Health:
    health = Health()
    health.set(State.SERVING)
    return health


@contextlib.asynccontextmanager
async def grpc_harness(
    engine: Engine,
    config: ServingConfig | None = None,
    *,
    keys: ApiKeys | None = None,
    health: Health | None = None,
    **named: Any,
) -> AsyncIterator[GrpcHarness]:
    """A server around `engine` for one test; `named` is passed to `tiny_service`.

    It checks at the end that no call and no page is left.
    """
    config = config or ServingConfig(grpc_port=0)
    health = health or serving_health()
    metrics = Metrics(health)
    async with tiny_service(engine, config.limits, **named) as service:
        server = build_grpc_server(service, config, keys, health, metrics)
        port = await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield GrpcHarness(service, server, metrics, channel, port)
        finally:
            brake = getattr(engine.step, "__self__", None)
            if isinstance(brake, Brake):
                brake.release()  # a failed test may have left it on hold
            await server.stop(0.0)


def config(**limits: Any) -> ServingConfig:
    """A configuration with any free port and these limits."""
    return ServingConfig(grpc_port=0, limits=LimitsConfig(**limits))


def make_request(text: str = "a prompt", max_tokens: int = 8, **named: Any) -> pb.GenerateRequest:
    """A greedy request; `params` overrides its parameters, other names are request fields."""
    params = pb.SamplingParams(**{**GREEDY, "max_tokens": max_tokens, **named.pop("params", {})})
    if "token_ids" not in named and "chat" not in named:
        named["text"] = text
    return pb.GenerateRequest(params=params, **named)


async def streamed(harness: GrpcHarness, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [message async for message in harness.stub.Generate(request)]


async def error_of(call: Any) -> Any:
    """The `AioRpcError` of a call, unary or streaming."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


def joined(parts: list[pb.GenerateResponse]) -> list[pb.Sample]:
    """The complete samples of a stream."""
    whole: dict[int, pb.Sample] = {}
    for part in parts:
        if part.HasField("sample"):
            sample = whole.setdefault(part.sample.index, pb.Sample(index=part.sample.index))
            sample.text += part.sample.text
            sample.token_ids.extend(part.sample.token_ids)
            sample.logprobs.extend(part.sample.logprobs)
            sample.finish_reason = part.sample.finish_reason
    return [whole[index] for index in sorted(whole)]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a test, and check that it leaves no task behind."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await coroutine
        this = asyncio.current_task()
        for _ in range(200):  # gRPC's own tasks end a little after their calls
            if asyncio.all_tasks() == {this}:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(asyncio.all_tasks() - {this})

    asyncio.run(bounded())


class Relay:
    """A TCP relay to the server that can be cut, as if the client was killed, or frozen, as if its
    machine had vanished without closing the connection."""

    def __init__(self, port: int):
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        """Keep both connections open, but relay nothing more."""
        for task in self._tasks:
            task.cancel()

    def cut(self) -> None:
        self._server.close()
        self.freeze()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(_copy(source, target)))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
