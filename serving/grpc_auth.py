"""Authentication of gRPC calls by a bearer token, before a message is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from jaxinfer.serving.auth import ApiKeys, bearer_token

OPEN_PREFIX = "/grpc.health.v1.Health/"  # probes of supervisors carry no key
REFUSAL = (
    "this server needs an API key, and the call carries no known one; send the metadata "
    "'authorization: Bearer KEY'"
)


def caller_name(metadata: Any, keys: ApiKeys) -> str | None:
    """The name of the key in a call's metadata; None if it carries none of `keys`."""
    for name, value in metadata or ():
        if name == "authorization":
            return keys.name_of(bearer_token(value))
    return None


class BearerAuth(grpc.aio.ServerInterceptor):
    """Passes calls that carry one of `keys`, and health checks; refuses all others as
    UNAUTHENTICATED.
    """

    def __init__(self, keys: ApiKeys, on_refused: Callable[[], None]):
        self._keys = keys
        self._on_refused = on_refused
        # Stream to stream, whatever the method is: it aborts before any message is read.
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
