"""uvicorn as an object to start and stop, with time limits on slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxinfer.serving.config import ServingConfig

MAX_HEADER_BYTES = 65_536  # request line and headers together
BACKLOG = 2048  # a burst of connections reaches the app, which refuses those it cannot serve


def build_http_server(app: Any, config: ServingConfig) -> HttpServer:
    """A server for `app` on `config.host` and `config.http_port`, over TLS if it is configured."""
    return HttpServer(app, config)


class HttpServer:
    """An HTTP server to `start` and `stop` in one event loop. It installs no signal handlers."""

    def __init__(self, app: Any, config: ServingConfig):
        self._host, self._port = config.host, config.http_port or 0
        tls = config.tls
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_protocol(config.limits.send_timeout_s, config.keepalive_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=config.keepalive_s,  # type: ignore[arg-type]
                ssl_certfile=tls.certificate,
                ssl_keyfile=tls.key,
                ssl_ca_certs=tls.client_ca,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; returns the port.

        Raises `OSError` if the address is in use or not one of this machine's, or if a TLS file
        cannot be read.
        """
        self._server.config.load()  # here, so that its errors reach the caller
        listener = _listen(self._host, self._port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        await self._server.is_up.wait()
        return listener.getsockname()[1]

    @property
    def num_connections(self) -> int:
        """Open connections, idle or not."""
        return len(self._server.server_state.connections)

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, give those at work `grace_s` seconds, then abort them."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._serving
        state = self._server.server_state
        for connection in list(state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if state.tasks:
            await asyncio.wait(list(state.tasks))


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; `is_up` is set once it listens."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _protocol(send_timeout_s: float, header_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class with these options: uvicorn instantiates it for each connection."""
    options = {"send_timeout_s": send_timeout_s, "header_timeout_s": header_timeout_s}
    return type("TimedProtocol", (_TimedProtocol,), options)


class _TimedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with time limits: it aborts the connection of a client that reads nothing
    or does not finish its headers.

    The transport reports when its buffer is full and when it has drained, so that a write costs
    nothing extra.
    """

    send_timeout_s: float  # 0: none
    header_timeout_s: float
    _write_timer: asyncio.TimerHandle | None = None
    _header_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_write_timer()
        self._cancel_header_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._header_timer is not None:  # the headers are incomplete
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.transport.abort()
                return
        # The rest of a refused body is read and dropped: a client whose connection is aborted while
        # it sends may never see the refusal. One that stops sending counts as idle.
        is_done = self.cycle is not None and self.cycle.response_complete
        if is_done and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.send_timeout_s:
            self._write_timer = self.loop.call_later(self.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_write_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_timer is None:
            self._start_header_timer()

    def on_headers_complete(self) -> None:
        self._num_header_bytes = 0
        self._cancel_header_timer()
        super().on_headers_complete()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait until it is read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
