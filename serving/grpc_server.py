"""The gRPC server: `jaxinfer.v1.Inference`, with the standard health and reflection services.

Handlers run in the same event loop as the HTTP server's. The request of a call that ends early, on
either side, is cancelled; its deadline is the earlier of the call's own and `timeout_s`. While
a client does not read, flow control blocks the handler in `write`, deltas that arrive meanwhile are
joined, and the loop's limit on unread output applies; after `limits.send_timeout_s` the request is
cancelled. The status of the call waits behind its data: a gRPC server cannot reset a call, so
a client that never reads, cancels or disconnects keeps the buffers of that call, but nothing of the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from absl import logging
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxinfer.options import ConfigError
from jaxinfer.serving import grpc_messages as messages
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import ServingConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import Chat, EmbeddingRequest, GenerationRequest
from jaxinfer.serving.grpc_auth import BearerAuth, caller_name
from jaxinfer.serving.grpc_health import HealthServicer
from jaxinfer.serving.grpc_status import abort
from jaxinfer.serving.grpc_tls import server_credentials
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.service import Service
from jaxinfer.serving.stream import Stream

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
MIN_PING_INTERVAL_S = 5.0  # a client that pings more often is disconnected

Context = grpc.aio.ServicerContext
Method = Callable[[Any, Context], Coroutine[Any, Any, Any]]


def build_grpc_server(
    service: Service,
    config: ServingConfig,
    keys: ApiKeys | None,
    health: Health,
    metrics: Metrics,
) -> GrpcServer:
    """A server to start. Without `keys` everybody may call. `ConfigError` for bad TLS files."""
    return GrpcServer(service, config, keys, health, metrics)


class GrpcServer:
    """Listens from `start` to `stop`, in one event loop; it can be started once."""

    def __init__(
        self,
        service: Service,
        config: ServingConfig,
        keys: ApiKeys | None,
        health: Health,
        metrics: Metrics,
    ):
        self._config = config
        self._keys = keys
        self._credentials = server_credentials(config.tls)
        self._inference = _Inference(service, config.limits.send_timeout_s, keys, metrics)
        self._on_refused = lambda: metrics.count_refusal("grpc", ErrorKind.UNAUTHENTICATED)
        self._state = health
        self._health = HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen on `config.grpc_port`; returns the port. Raises `ConfigError` if it is in use."""
        config = self._config
        interceptors = [] if self._keys is None else [BearerAuth(self._keys, self._on_refused)]
        server = self._server = grpc.aio.server(interceptors=interceptors, options=_options(config))
        server.add_generic_rpc_handlers((self._inference.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._set_health(self._state.state)
        self._state.subscribe(self._on_state)

        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port or 0}"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error}; it is in use, or not this machine's. "
                "Choose another serving.grpc_port or serving.host"
            ) from error
        await server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls; give the others `grace_s` seconds to end, then cancel them."""
        if self._server is None:
            return
        await self._health.end()
        await self._server.stop(grace_s)
        await self._inference.end()
        await asyncio.gather(*self._tasks)

    def _on_state(self, state: State) -> None:
        task = asyncio.get_running_loop().create_task(self._set_health(state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self, state: State) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if state is State.SERVING else statuses.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)


class _Inference:
    """The methods of the service. They raise `ServiceError`; `_handler` converts it to a status."""

    def __init__(
        self, service: Service, send_timeout_s: float, keys: ApiKeys | None, metrics: Metrics
    ):
        self._service = service
        self._metrics = metrics
        self._send_timeout_s = send_timeout_s
        self._keys = keys
        self._calls: set[asyncio.Task[Any]] = set()  # unfinished

    async def end(self) -> None:
        """Cancel unfinished calls and wait until they have cleaned up, which gRPC does not do."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def handlers(self) -> grpc.GenericRpcHandler:
        unary, streaming = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "Generate": self._handler(streaming, self.generate, pb.GenerateRequest),
            "Complete": self._handler(unary, self.complete, pb.GenerateRequest),
            "Embed": self._handler(unary, self.embed, pb.EmbedRequest),
            "Tokenize": self._handler(unary, self.tokenize, pb.TokenizeRequest),
            "Detokenize": self._handler(unary, self.detokenize, pb.DetokenizeRequest),
            "GetModel": self._handler(unary, self.get_model, pb.GetModelRequest),
            "GetStats": self._handler(unary, self.get_stats, pb.GetStatsRequest),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        stream = await self._submit(request, context)
        try:
            async with _WriteTimeout(stream, self._send_timeout_s) as writer:
                await writer.write(context, messages.started(stream))
                num_unfinished = stream.request.params.n
                async for delta in stream:
                    message = pb.GenerateResponse(sample=messages.sample(delta))
                    if delta.finish_reason is not None:
                        num_unfinished -= 1
                        if num_unfinished == 0:
                            message.finished.CopyFrom(messages.finished(stream))
                    await writer.write(context, message)
        finally:
            stream.cancel()

    async def complete(self, request: pb.GenerateRequest, context: Context) -> pb.CompleteResponse:
        stream = await self._submit(request, context)
        try:
            result = await stream.collect()
        finally:
            stream.cancel()
        return pb.CompleteResponse(
            request_id=stream.id,
            samples=map(messages.sample, result.samples),
            finished=messages.finished(stream),
        )

    async def embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        service, accepted = self._service, asyncio.Event()
        try:
            service.check_can_embed()
            service.loop.check_capacity()  # before any work
            service.check_model(request.model)
            timeout_s = _timeout_s(request, context, service.loop.limits.timeout_s)
            optional = ("normalize", "dimensions", "prompt_name")
            result = await service.embed(
                EmbeddingRequest(
                    messages.read_inputs(request),
                    truncate=request.truncate,
                    request_id=request.request_id or None,
                    timeout_s=timeout_s,
                    protocol="grpc",
                    user=self._user(request.user, context),
                    **{n: getattr(request, n) for n in optional if request.HasField(n)},
                ),
                on_accepted=accepted.set,
            )
        except ServiceError as error:
            if not accepted.is_set():
                self._metrics.count_refusal("grpc", error.kind)
            raise
        if result.is_large:
            return await asyncio.to_thread(messages.embeddings, result)
        return messages.embeddings(result)

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._service.check_model(request.model)
        prompt = messages.read_prompt(request)
        add_special_tokens = (
            not request.HasField("add_special_tokens") or request.add_special_tokens
        )
        if isinstance(prompt, Chat) and request.HasField("add_special_tokens"):
            text = "add_special_tokens is for a text; a chat template adds its own special tokens"
            raise ServiceError(ErrorKind.INVALID, text, field="add_special_tokens")
        ids = await self._service.tokenize(prompt, add_special_tokens=add_special_tokens)
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        self._service.check_model(request.model)
        return pb.DetokenizeResponse(text=await self._service.detokenize(request.token_ids))

    async def get_model(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        return messages.model(self._service.model)

    async def get_stats(self, request: pb.GetStatsRequest, context: Context) -> pb.Stats:
        return messages.stats(self._service.stats)

    async def _submit(self, request: pb.GenerateRequest, context: Context) -> Stream:
        try:
            return await self._generate(request, context)
        except ServiceError as error:
            self._metrics.count_refusal("grpc", error.kind)
            raise

    async def _generate(self, request: pb.GenerateRequest, context: Context) -> Stream:
        service = self._service
        service.check_can_generate()
        service.loop.check_capacity()  # before any work
        service.check_model(request.model)
        return await service.generate(
            GenerationRequest(
                messages.read_prompt(request),
                service.params(messages.read_params(request.params)),
                request_id=request.request_id or None,
                priority=request.priority,
                cache_salt=request.cache_salt,
                timeout_s=_timeout_s(request, context, service.loop.limits.timeout_s),
                protocol="grpc",
                user=self._user(request.user, context),
            )
        )

    def _user(self, named: str, context: Context) -> str:
        """The user that the request names, or the name of its key."""
        if named or self._keys is None:
            return named
        return caller_name(context.invocation_metadata(), self._keys) or ""

    def _handler(
        self, kind: Callable[..., grpc.RpcMethodHandler], method: Method, message: type[Any]
    ) -> grpc.RpcMethodHandler:
        """A handler of `method` that converts exceptions, except cancellation, to statuses."""
        name = message.DESCRIPTOR.full_name

        def parse(data: bytes) -> Any:
            try:
                return message.FromString(data)
            except DecodeError:
                return None  # `handle` refuses it; gRPC itself would not give the reason

        async def handle(request: Any, context: Context) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                if request is None:
                    # gRPC's list of status codes names INTERNAL for this.
                    raise ServiceError(ErrorKind.INTERNAL, f"the request's bytes are not a {name}")
                return await method(request, context)
            except ServiceError as error:
                failure = error
            except Exception:
                logging.exception("a defect at %s", name)
                text = "the server failed at this request; its log has the reason"
                failure = ServiceError(ErrorKind.INTERNAL, text)
            finally:
                self._calls.discard(task)
            await abort(context, failure)

        return kind(
            handle,
            request_deserializer=parse,
            response_serializer=lambda response: response.SerializeToString(),
        )


class _WriteTimeout:
    """Ends a call whose client reads nothing for `timeout_s` (0: never).

    It uses one timer a call, which checks from time to time whether a write has been waiting.
    A timer for each write would take a sixth of the event loop's time for a token.
    """

    def __init__(self, stream: Stream, timeout_s: float):
        self._stream = stream
        self._timeout_s = timeout_s
        self._writing_since: float | None = None
        self._has_cancelled = False

    async def __aenter__(self) -> _WriteTimeout:
        self._event_loop = asyncio.get_running_loop()
        self._call = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._schedule_check(self._timeout_s)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._has_cancelled and isinstance(error, asyncio.CancelledError):
            assert self._call is not None
            if self._call.uncancel():
                return  # the call was cancelled for another reason too
            text = (
                f"the client read nothing for {self._timeout_s} s "
                "(serving.limits.send_timeout_s); read faster"
            )
            raise self._stream.error or ServiceError(ErrorKind.SLOW_READER, text) from error

    async def write(self, context: Context, message: pb.GenerateResponse) -> None:
        self._writing_since = self._event_loop.time()
        await context.write(message)
        self._writing_since = None

    def _schedule_check(self, seconds: float) -> None:
        if self._timeout_s:
            self._timer = self._event_loop.call_later(seconds, self._check)

    def _check(self) -> None:
        since = self._writing_since
        waited = 0.0 if since is None else self._event_loop.time() - since
        if waited < self._timeout_s:
            self._schedule_check(self._timeout_s - waited)
        elif self._call is not None:
            self._has_cancelled = True
            self._call.cancel()


def _timeout_s(
    request: pb.GenerateRequest | pb.EmbedRequest, context: Context, limit_s: float
) -> float | None:
    """The earlier of the two deadlines, in seconds from now; None: the server's `limit_s` applies.

    A call's own deadline may exceed the limit; a field `timeout_s` beyond it is refused later.
    """
    remaining = context.time_remaining()
    if not request.HasField("timeout_s"):
        return None if remaining is None else min(max(0.0, remaining), limit_s)
    timeout_s = request.timeout_s  # any number: the service checks it
    return max(0.0, remaining) if remaining is not None and remaining < timeout_s else timeout_s


def _options(config: ServingConfig) -> list[tuple[str, int]]:
    keepalive_ms = int(config.keepalive_s * 1000)
    return [
        ("grpc.max_receive_message_length", config.limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),  # bounded by the context, or by max_waiting_texts
        ("grpc.so_reuseport", 0),  # else a second server gets half of the connections
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        (
            "grpc.http2.ping_timeout_ms",
            keepalive_ms,
        ),  # else a minute, whatever the option above says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_PING_INTERVAL_S * 1000)),
    ]
