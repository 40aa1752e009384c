"""A light HTTP/1.1 client for streamed answers of OpenAI-compatible servers.

It is written by hand because client and server share a machine's cores when this project measures
itself: an event costs it 19 us of processor time, aiohttp 30 and httpx 78 (medians of four
alternating rounds of 16 streams on asyncio's own loop, 2 busy cores of an AMD EPYC, 2026-11-29). It
implements the part of HTTP that such servers use: a POST with a JSON body; a reply with a length,
in chunks, or up to the connection's end; and server-sent events. Connections are kept alive and
reused.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from jaxinfer.tools.load_client.record import Record
from jaxinfer.tools.load_client.workload import LoadJob

Clock = Callable[[], float]  # seconds since the load's start


class RequestFailed(Exception):
    """A request without a complete answer: the kind of failure, and its message."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class EventReader:
    """Splits arriving bytes into server-sent events; `on_event` receives the data of each."""

    def __init__(self, on_event: Callable[[bytes], None]):
        self._on_event = on_event
        self._rest = b""

    def feed(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                self._on_event(event[6:])
                continue
            lines = [x[5:].removeprefix(b" ") for x in event.split(b"\n") if x[:5] == b"data:"]
            if lines:
                self._on_event(b"\n".join(lines))


class Connection(asyncio.Protocol):
    """One connection, which carries one request and reply at a time."""

    def __init__(self):
        self.transport: asyncio.Transport | None = None
        self.num_exchanges = 0
        self.can_be_reused = True
        self.has_reply = False  # a byte of the current reply has arrived
        self._done: asyncio.Future[None] | None = None
        self._on_head: Callable[[int, Mapping[str, str]], Callable[[bytes], None]]

    async def exchange(
        self,
        request: bytes,
        on_head: Callable[[int, Mapping[str, str]], Callable[[bytes], None]],
    ) -> None:
        """Send `request` and wait for the end of its reply.

        `on_head(status, headers)` returns a consumer of the body's bytes. Raises `RequestFailed`.
        """
        self.num_exchanges += 1
        self.has_reply = False
        self._on_head = on_head
        self._rest, self._parse = b"", self._head
        self._done = asyncio.get_running_loop().create_future()
        if not self.is_open:
            self._fail("disconnected", "the connection was closed before the request was sent")
        else:
            self.transport.write(request)  # type: ignore[union-attr]
        try:
            await self._done
        finally:
            self._done = None

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.can_be_reused = False
        self.transport = None
        if self._done is not None and not self._done.done():
            if self.has_reply and self._parse == self._until_end:
                self._done.set_result(None)
            else:
                self._fail("disconnected", str(exc or "the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return self.abort()  # data without a request
        self.has_reply = True
        try:
            self._rest = self._parse(self._rest + data if self._rest else data)
        except (ValueError, IndexError) as error:
            self._fail("bad reply", f"{type(error).__name__}: {error}")
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self.can_be_reused = False
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, kind: str, detail: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RequestFailed(kind, detail))

    # Each parser takes the bytes that have arrived and returns those that it cannot use yet.

    def _head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return data
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
        if not first.startswith("HTTP/1."):
            raise ValueError(f"{first!r} is not a status line of HTTP/1.1")
        if 100 <= status < 200:
            return self._head(data[end + 4 :])
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        self._on_body = self._on_head(status, headers)
        usual = "close" if first.startswith("HTTP/1.0") else "keep-alive"
        self.can_be_reused = headers.get("connection", usual).lower() != "close"
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._parse = self._chunks
        elif "content-length" in headers:
            self._num_left = int(headers["content-length"])
            self._parse = self._counted
        else:
            self.can_be_reused = False
            self._parse = self._until_end
        return self._parse(data[end + 4 :])

    def _chunks(self, data: bytes) -> bytes:
        start = 0
        while (eol := data.find(b"\r\n", start)) >= 0:
            size = int(data[start:eol].partition(b";")[0], 16)
            if size == 0:
                if data.find(b"\r\n\r\n", eol) >= 0:  # after trailers, if any
                    self._finish()
                    return b""
                break
            end = eol + 2 + size
            if len(data) < end + 2:
                break
            self._on_body(data[eol + 2 : end])
            start = end + 2
        return data[start:]

    def _counted(self, data: bytes) -> bytes:
        self._num_left -= len(data)
        if data:
            self._on_body(data)
        if self._num_left <= 0:
            self._finish()
        return b""

    def _until_end(self, data: bytes) -> bytes:
        self._on_body(data)
        return b""

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class HttpClient:
    """Sends jobs to `/v1/completions` or `/v1/chat/completions` and times their streams.

    `fields` are added to every body, so any option of a server can be used.
    """

    def __init__(
        self,
        url: str,
        api: str,
        *,
        model: str,
        api_key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ):
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self._ssl = ssl.create_default_context() if is_tls else None
        self._host = parts.hostname or "localhost"
        self._port = parts.port or (443 if is_tls else 80)
        root = parts.path.rstrip("/").removesuffix("/v1")
        self._is_chat = api == "chat"
        self._root = root
        self._path = f"{root}/v1/chat/completions" if self._is_chat else f"{root}/v1/completions"
        self._headers = f"Host: {parts.netloc}\r\nUser-Agent: bench_serve\r\n"
        if api_key is not None:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        options = {"include_usage": True}
        self._fields = {"model": model, "stream": True, "stream_options": options, **(fields or {})}
        self._idle: list[Connection] = []

    async def open(self, count: int) -> None:
        """Open `count` connections in advance, so that sending does not wait for them."""
        self._idle += await asyncio.gather(*(self._connect() for _ in range(count)))

    async def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop

    async def send(
        self, job: LoadJob, record: Record, clock: Clock, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Send a job and fill its record as the answer arrives; raises `RequestFailed` or
        `OSError`.

        `fields` are added to this body alone. Cancellation closes the connection.
        """
        reply = _Reply(record, clock)
        await self._request("POST", self._path, self.body(job, fields or {}), reply.head)
        reply.check()

    async def get(self, path: str) -> bytes:
        """Get the body of a path relative to the server's root; raises `RequestFailed` without
        200."""
        record = Record(0, 0.0)
        reply = _Reply(record, lambda: 0.0)
        await self._request("GET", self._root + path, b"", reply.head)
        if record.status != "200":
            raise RequestFailed(f"HTTP {record.status}", reply.text)
        return bytes(reply.body)

    def body(self, job: LoadJob, fields: Mapping[str, Any]) -> bytes:
        """The JSON body of a job's request."""
        body = self._fields | {"max_tokens": job.max_tokens} | dict(fields)
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        return json.dumps(body).encode()

    def request(self, method: str, path: str | None, body: bytes) -> bytes:
        """The bytes of a request; `path` None is the path of jobs."""
        head = f"{method} {path or self._path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def _request(self, method: str, path: str, body: bytes, on_head: Any) -> None:
        request = self.request(method, path, body)
        while True:
            connection = await self._connection()
            try:
                await connection.exchange(request, on_head)
                break
            except RequestFailed as failure:
                # The server may close an idle connection just as it is reused: retry.
                was_stale = connection.num_exchanges > 1 and not connection.has_reply
                if not (failure.kind == "disconnected" and was_stale):
                    raise
            except BaseException:
                connection.abort()
                raise
        if connection.can_be_reused:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._host, self._port, ssl=self._ssl
        )
        return connection


class _Reply:
    """Reads one answer into a record."""

    def __init__(self, record: Record, clock: Clock):
        self.body = bytearray()  # of a reply that is not a stream
        self._record = record
        self._clock = clock
        self._is_stream = False
        self._is_whole = False
        self._error: Any = None

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")[:300]

    def head(self, status: int, headers: Mapping[str, str]) -> Callable[[bytes], None]:
        """Read the head of the reply; return a consumer of its body."""
        self._record.status = str(status)
        if status == 200 and headers.get("content-type", "").startswith("text/event-stream"):
            self._is_stream = True
            return EventReader(self._event).feed
        return self.body.extend

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_whole = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"the event {data[:100]!r} is not a JSON object")
        if event.get("error"):
            self._error = event["error"]
            return
        if usage := event.get("usage"):
            self._record.prompt_tokens = usage.get("prompt_tokens") or 0
            self._record.output_tokens = usage.get("completion_tokens") or 0
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            if choice.get("text") or (delta and (delta.get("content") or delta.get("reasoning"))):
                self._record.times.append(self._clock())
                return

    def check(self) -> None:
        """Raise `RequestFailed` unless the answer is complete."""
        record = self._record
        if record.status != "200":
            raise RequestFailed(f"HTTP {record.status}", self.text)
        if not self._is_stream:
            raise RequestFailed("no stream", self.text)
        if self._error is not None:
            kind = self._error.get("type") if isinstance(self._error, dict) else None
            raise RequestFailed(f"in the stream: {kind or 'error'}", str(self._error)[:300])
        if not self._is_whole:
            raise RequestFailed("incomplete", "the stream ended without its [DONE]")
        record.output_tokens = record.output_tokens or len(record.times)
