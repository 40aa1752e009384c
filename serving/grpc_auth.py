"""Who may call the gRPC door: a bearer token in the metadata, checked before a message is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from jaxinfer.serving.auth import ApiKeys, bearer_token

OPEN_PREFIX = "/grpc.health.v1.Health/"  # probes of a supervisor carry no key
REFUSAL = (
    "this server needs an API key, and the call has none that it knows: send the metadata "
    "'authorization: Bearer KEY'"
)


def caller_name(metadata: Any, keys: ApiKeys) -> str | None:
    """The name of the key that a call carries in its metadata; None: it carries none of `keys`."""
    for name, value in metadata or ():
        if name == "authorization":
            return keys.name_of(bearer_token(value))
    return None


class BearerAuth(grpc.aio.ServerInterceptor):
    """Lets calls pass that carry one of `keys`; refuses others as UNAUTHENTICATED, whatever they
    ask for. Health checks are open.
    """

    def __init__(self, keys: ApiKeys, on_refused: Callable[[], None]):
        self._keys = keys
        self._on_refused = on_refused
        # Of this kind, whatever the method's: it answers before any message is read.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        is_open = handler_call_details.method.startswith(OPEN_PREFIX)
        if is_open or caller_name(handler_call_details.invocation_metadata, self._keys) is not None:
            return await continuation(handler_call_details)
        self._on_refused()
        return self._refusal


async def _refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
