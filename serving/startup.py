"""The server while its model is loaded: its ports, and its HTTP responses."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer import ConfigError
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.health import Health
from jaxinfer.serving.http.errors import error_response, json_response

RETRY_S = 5.0


class StartupApp:
    """The HTTP application while the model is loaded, then a proxy of `app`.

    Until `app` is set, `/health/live` answers 200 and everything else 503, so that a probe can tell
    a process that is loading from one that has died.
    """

    def __init__(self, health: Health):
        self.app: ASGIApp | None = None
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._respond(scope["path"])(scope, receive, send)

    def _respond(self, path: str) -> ASGIApp:
        if path == "/health/live" and self._health.is_live:
            return json_response(b'{"status": "starting"}')
        text = "the model is being loaded; try again soon"
        error = ServiceError(ErrorKind.UNAVAILABLE, text, retry_after_s=RETRY_S)
        return error_response(error)


@contextlib.contextmanager
def port_errors(host: str, port: int, option: str) -> Iterator[None]:
    """Convert the `OSError` of an unusable port to a `ConfigError` that names its `option`."""
    try:
        yield
    except OSError as error:
        # The error of an unknown host name has a number of another kind.
        is_name = isinstance(error, socket.gaierror)
        reason = error.strerror if is_name else os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}); set {option} to another port, or to 0 for "
            "any free one, and serving.host to an address of this machine"
        ) from error


def check_port(host: str, port: int, option: str) -> None:
    """Raise `ConfigError` if the port cannot be listened on; does not keep it."""
    with port_errors(host, port, option):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
