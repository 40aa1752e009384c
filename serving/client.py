"""A thin, typed client of the gRPC server: `Client`, and `AsyncClient` for asyncio.

    with Client("127.0.0.1:9000") as client:
        for delta in client.generate("Once upon a time", max_tokens=32):
            print(delta.text, end="")
        result = client.complete(messages=[{"role": "user", "content": "Hello"}])
        vectors = client.embed(["one text", "another"]).vectors  # an encoder

A prompt is a text, token ids or messages. A call that fails raises `RpcError`; options that cannot
be sent raise `TypeError` or `ValueError` beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxinfer.engine.request import TokenLogprobs
from jaxinfer.engine.stats import EngineStats
from jaxinfer.serving import grpc_messages as messages_
from jaxinfer.serving.client_request import (
    ClientTls,
    EmbedOptions,
    Messages,
    Options,
    embed_request,
    generate_request,
    metadata_for,
    tokenize_request,
)
from jaxinfer.serving.generation import Delta, Embeddings, Result, Timing, Usage
from jaxinfer.serving.grpc_status import FIELD_KEY, RETRY_AFTER_KEY
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.protos.jaxinfer.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serving.service import ModelInfo

DEFAULT_TARGET = "127.0.0.1:9000"

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # the caller chose the server
    ("grpc.keepalive_time_ms", 30_000),  # to notice a server that vanished
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, whatever the option above says
)


class RpcError(Exception):
    """A call that failed: gRPC's code, and the text and details of the server."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.field = field  # the input at fault
        self.retry_after_s = retry_after_s  # after which a retry makes sense


class _ResponseStream:
    """The response to one request: what the iterators of both clients have in common."""

    def __init__(self, call: Any):
        self._call = call
        self.request_id: str | None = None  # from the first delta on
        # From the last delta on.
        self.usage: Usage | None = None
        self.timing: Timing | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel the request; no effect once it has ended."""
        self._is_cancelled = True
        self._call.cancel()

    def _read(self, message: pb.GenerateResponse) -> Delta | None:
        if message.HasField("started"):
            self.request_id = message.started.request_id
        if message.HasField("finished"):
            self.usage = messages_.read_usage(message.finished.usage)
            self.timing = messages_.read_timing(message.finished.timing)
            self.prompt_logprobs = messages_.read_prompt_logprobs(message.finished)
        return messages_.read_sample(message.sample) if message.HasField("sample") else None


class ResponseStream(_ResponseStream):
    """An iterable of deltas; leaving its loop early cancels the request."""

    def __iter__(self) -> Iterator[Delta]:
        try:
            for message in self._call:
                delta = self._read(message)
                if delta is not None:
                    yield delta
        except grpc.RpcError as error:
            raise _rpc_error(error) from None
        finally:
            self._call.cancel()


class AsyncResponseStream(_ResponseStream):
    """An asynchronous iterable of deltas; leaving its loop early cancels the request."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for message in self._call:
                delta = self._read(message)
                if delta is not None:
                    yield delta
        except grpc.RpcError as error:
            raise _rpc_error(error) from None
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise  # the task was cancelled, not this response
            raise RpcError(grpc.StatusCode.CANCELLED, "cancelled by the client") from None
        finally:
            self._call.cancel()


class Client:
    """A connection to one server, for any number of threads; `close` it, or use it in a `with`.

    `timeout_s` is the default of the calls; None leaves it to the server.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        timeout_s: float | None = None,
    ):
        if tls is None:
            self._channel = grpc.insecure_channel(target, _CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, tls.credentials(), _CHANNEL_OPTIONS)
        self._stub: Any = InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = metadata_for(api_key)
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> ResponseStream:
        """Generate and return the output as it is made, an iterable of deltas."""
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = generate_request(prompt, token_ids, messages, options)
        return ResponseStream(
            self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        )

    def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Generate and return the complete output."""
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = generate_request(prompt, token_ids, messages, options)
        return messages_.read_result(self._call(self._stub.Complete, request, timeout_s))

    def embed(
        self, inputs: str | Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of one text, or of several texts and lists of token ids, in order."""
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = embed_request(inputs, options)
        return messages_.read_embeddings(self._call(self._stub.Embed, request, timeout_s))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """The token ids of messages, or of a text, by default with its special tokens."""
        request = tokenize_request(text, messages, add_special_tokens)
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._call(self._stub.Detokenize, pb.DetokenizeRequest(token_ids=token_ids)).text

    def model(self) -> ModelInfo:
        return messages_.read_model(self._call(self._stub.GetModel, pb.GetModelRequest()))

    def stats(self) -> EngineStats:
        return messages_.read_stats(self._call(self._stub.GetStats, pb.GetStatsRequest()))

    def health(self, service: str = "") -> bool:
        """Whether requests are accepted, by a service of this name; empty: the whole server."""
        request = health_pb2.HealthCheckRequest(service=service)
        return _is_serving(self._call(self._health.Check, request))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _rpc_error(error) from None


class AsyncClient:
    """`Client` for one event loop: its methods are awaited, and `generate` is iterated."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        timeout_s: float | None = None,
    ):
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, _CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, tls.credentials(), _CHANNEL_OPTIONS)
        self._stub: Any = InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = metadata_for(api_key)
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> AsyncResponseStream:
        """Generate and return the output as it is made, an asynchronous iterable of deltas."""
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = generate_request(prompt, token_ids, messages, options)
        return AsyncResponseStream(
            self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        )

    async def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """Generate and return the complete output."""
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = generate_request(prompt, token_ids, messages, options)
        return messages_.read_result(await self._call(self._stub.Complete, request, timeout_s))

    async def embed(
        self, inputs: str | Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of one text, or of several texts and lists of token ids, in order."""
        timeout_s = options.pop("timeout_s", self._timeout_s)
        request = embed_request(inputs, options)
        return messages_.read_embeddings(await self._call(self._stub.Embed, request, timeout_s))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """The token ids of messages, or of a text, by default with its special tokens."""
        request = tokenize_request(text, messages, add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return (await self._call(self._stub.Detokenize, request)).text

    async def model(self) -> ModelInfo:
        return messages_.read_model(await self._call(self._stub.GetModel, pb.GetModelRequest()))

    async def stats(self) -> EngineStats:
        return messages_.read_stats(await self._call(self._stub.GetStats, pb.GetStatsRequest()))

    async def health(self, service: str = "") -> bool:
        """Whether requests are accepted, by a service of this name; empty: the whole server."""
        request = health_pb2.HealthCheckRequest(service=service)
        return _is_serving(await self._call(self._health.Check, request))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _rpc_error(error) from None


def _is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return response.status == health_pb2.HealthCheckResponse.SERVING


def _rpc_error(error: Any) -> RpcError:
    """The error of a call, of either kind of channel."""
    metadata = dict(error.trailing_metadata() or ())
    retry_after = metadata.get(RETRY_AFTER_KEY)
    return RpcError(
        error.code(),
        error.details() or "",
        field=metadata.get(FIELD_KEY),
        retry_after_s=None if retry_after is None else float(retry_after),
    )
