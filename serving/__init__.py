"""The server around an engine: gRPC and OpenAI-compatible HTTP over one engine loop.

jaxinfer serve -> process -> grpc_server, http -> service -> loop -> Engine

`Client` and `AsyncClient` are clients of its gRPC endpoint.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.serving.client import AsyncClient, Client, RpcError

__all__ = ["AsyncClient", "Client", "RpcError"]


def __getattr__(name: str) -> Any:
    """Import the client at its first use: a server of HTTP alone needs no gRPC."""
    if name in __all__:
        return getattr(importlib.import_module("jaxinfer.serving.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
