"""gRPC calls as hand-made HTTP/2 frames, one call a connection, for bursts of many clients.

A burst ends within a tenth of a second, in which grpc.aio, with 370 us of client work a call
against 110 here (2 busy cores of an AMD EPYC, 2026-11-29), would measure itself and not the server.
This client does the minimum that a gRPC server accepts: it reads no header but the status, which
servers on gRPC's C core write as plain text in a connection's first answer. Use `GrpcClient` for
everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc

from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.tools.load_client.grpc import METHOD, request_message, request_template
from jaxinfer.tools.load_client.http import Clock, RequestFailed
from jaxinfer.tools.load_client.record import Record
from jaxinfer.tools.load_client.workload import LoadJob

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM = ACK = 1
END_HEADERS = 4
STREAM = 1  # the only stream of a connection
STATUSES = {str(code.value[0]): code.name for code in grpc.StatusCode}


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a frame (RFC 9113, section 4.1)."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _literal(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def request_headers(address: str, api_key: str | None) -> bytes:
    """A HEADERS frame for `Generate`, of literals without indexing (RFC 7541, section 6.2.2)."""
    block = b"\x83\x86" + b"\x04" + _literal(METHOD) + b"\x01" + _literal(address)
    fields = {"content-type": "application/grpc", "te": "trailers"}
    if api_key is not None:
        fields["authorization"] = f"Bearer {api_key}"
    for name, value in fields.items():
        block += b"\x00" + _literal(name) + _literal(value)
    return frame(HEADERS, END_HEADERS, STREAM, block)


def plain_header(block: bytes, name: str) -> str | None:
    """The value of a plain-text header in a header block; None if there is none."""
    start = block.find(_literal(name))
    if start < 0:
        return None
    start += 1 + len(name)
    length = block[start]
    if length >= 127:  # compressed, or a length of several bytes
        return None
    return block[start + 1 : start + 1 + length].decode("latin-1")


class FrameConnection(asyncio.Protocol):
    """One connection, which carries one call."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.is_ready = loop.create_future()
        self.is_done = loop.create_future()
        self._frames = self._messages = b""
        self._record: Record | None = None

    def call(self, request: bytes, record: Record, clock: Clock) -> None:
        """Send the frames of a request; `is_done` is set when it has been answered."""
        self._record, self._clock = record, clock
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("disconnected", str(exc or "the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        data = self._frames + data
        while len(data) >= 9 and len(data) >= (end := 9 + int.from_bytes(data[:3], "big")):
            self._take(data[3], data[4], data[9:end])
            data = data[end:]
        self._frames = data

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == DATA:
            self._read(payload)
        elif kind == HEADERS and flags & END_STREAM:
            self._end(payload)
        elif kind == SETTINGS and not flags & ACK:
            self.transport.write(frame(SETTINGS, ACK, 0))
            if not self.is_ready.done():
                self.is_ready.set_result(None)
        elif kind == PING and not flags & ACK:
            self.transport.write(frame(PING, ACK, 0, payload))
        elif kind in (RESET, GOAWAY):
            self._fail("disconnected", f"HTTP/2 frame {kind}: {payload.hex()}")

    def _read(self, payload: bytes) -> None:
        assert self._record is not None
        data = self._messages + payload
        while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5], "big")):
            response = pb.GenerateResponse.FromString(data[5:end])
            if response.sample.text:
                self._record.times.append(self._clock())
            if response.HasField("finished"):
                self._record.prompt_tokens = response.finished.usage.prompt_tokens
                self._record.output_tokens = response.finished.usage.output_tokens
            data = data[end:]
        self._messages = data

    def _end(self, block: bytes) -> None:
        assert self._record is not None
        number = plain_header(block, "grpc-status")
        status = self._record.status = STATUSES.get(number or "", "")
        if status == "OK" and not self.is_done.done():
            self.is_done.set_result(None)
        elif status:
            self._fail(status, plain_header(block, "grpc-message") or "")
        else:
            self._fail("bad reply", f"no plain grpc-status in {block[:100]!r}")

    def _fail(self, kind: str, detail: str) -> None:
        for future in (self.is_ready, self.is_done):
            if not future.done():
                future.set_exception(RequestFailed(kind, detail))
                future.exception()  # mark it as retrieved, since no one may await it


class FrameClient:
    """Sends each job on its own connection, which `open` prepares."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ):
        self._address = address
        self._template = request_template(model, fields or {})
        self._headers = request_headers(address, api_key)
        self._idle: list[FrameConnection] = []

    async def open(self, count: int) -> None:
        """Open `count` connections in advance."""
        loop = asyncio.get_running_loop()
        host, _, port = self._address.rpartition(":")
        for _ in range(count):
            _, connection = await loop.create_connection(
                FrameConnection, host.strip("[]"), int(port)
            )
            self._idle.append(connection)
        await asyncio.gather(*(connection.is_ready for connection in self._idle))

    async def close(self) -> None:
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop

    async def send(
        self, job: LoadJob, record: Record, clock: Clock, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Send a job and fill its record as the answer arrives; raises `RequestFailed`."""
        if not self._idle:
            await self.open(1)
        connection = self._idle.pop()
        message = request_message(self._template, job, fields or {}).SerializeToString()
        data = b"\x00" + len(message).to_bytes(4, "big") + message
        try:
            request = self._headers + frame(DATA, END_STREAM, STREAM, data)
            connection.call(request, record, clock)
            await connection.is_done
        finally:
            connection.transport.abort()
