"""The HTTP server under load: bursts, slow or disconnecting clients, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import time
from collections.abc import AsyncIterator

import pytest

from jaxinfer import Engine
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind
from jaxinfer.serving.stream import Stream
from tests.support.http_harness import GREEDY, HttpHarness, events_of, http_harness, run
from tests.support.tiny_server import Brake, tiny_engine

MAX_ROWS = 4  # of the tiny engine
NUM_CLIENTS = 500
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


@pytest.fixture
def brake(engine):
    brake = Brake(engine)
    yield brake
    brake.release()
    del engine.step  # the instance's own: the class's is back


def http_post(fields: dict, path: str = "/v1/completions", body: bytes | None = None) -> bytes:
    data = json.dumps(fields).encode() if body is None else body
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@contextlib.asynccontextmanager
async def connection(
    harness: HttpHarness, receive_buffer: int | None = None
) -> AsyncIterator[Connection]:
    """A bare connection: HTTP clients are slower than the server under test."""
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        port = int(harness.url.rpartition(":")[2])
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def test_burst_of_500_clients_fills_the_queue_and_refuses_the_rest(engine, brake):
    limits = LimitsConfig(max_waiting=64)
    request = http_post({**GREEDY, "prompt": "x", "max_tokens": 2})

    async def client(harness: HttpHarness, delays: list[float]) -> tuple[int, bytes]:
        async with connection(harness) as (reader, writer):
            start = time.perf_counter()
            writer.write(request)
            answer = await reader.read(-1)
            status = int(answer.split(b" ", 2)[1])
            if status == 429:
                delays.append(time.perf_counter() - start)
            return status, answer

    async def main():
        async with http_harness(engine, limits) as harness:
            await harness.complete("x", max_tokens=2)
            brake.hold()
            delays: list[float] = []
            tasks = [asyncio.create_task(client(harness, delays)) for _ in range(NUM_CLIENTS)]
            while len(delays) < NUM_CLIENTS - MAX_ROWS - 64:
                await asyncio.sleep(0.005)
            assert harness.service.loop.num_streams == MAX_ROWS + 64
            print(f"slowest of {len(delays)} refusals: {max(delays) * 1e3:.0f} ms")
            assert max(delays) < 2
            brake.release()
            answers = await asyncio.gather(*tasks)
            assert sorted({status for status, _ in answers}) == [200, 429]
            assert sum(status == 200 for status, _ in answers) == MAX_ROWS + 64
            for status, answer in answers:
                head, _, body = answer.partition(b"\r\n\r\n")
                if status == 429:
                    assert b"\r\nretry-after: 1\r\n" in head
                    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
                else:
                    assert json.loads(body)["usage"]["completion_tokens"] == 2
            await harness.idle()

    run(main())


def test_full_queue_is_reported_before_the_body_is_read(engine, brake):
    async def main():
        async with http_harness(engine, LimitsConfig(max_waiting=0)) as harness:
            brake.hold()
            held = [asyncio.create_task(harness.complete(max_tokens=1)) for _ in range(MAX_ROWS)]
            while harness.service.loop.num_streams < MAX_ROWS:
                await asyncio.sleep(0.005)
            async with connection(harness) as (reader, writer):
                writer.write(http_post({}).replace(b"Length: 2", b"Length: 1000")[:-2])
                assert (await reader.readline()).startswith(b"HTTP/1.1 429")
                brake.release()
                await asyncio.gather(*held)

    run(main())


def test_several_prompts_are_accepted_together_or_not_at_all(engine, brake):
    async def main():
        async with http_harness(engine, LimitsConfig(max_waiting=2)) as harness:
            brake.hold()
            held = [asyncio.create_task(harness.complete(max_tokens=1)) for _ in range(MAX_ROWS)]
            while harness.service.loop.num_streams < MAX_ROWS:
                await asyncio.sleep(0.005)
            reply = await harness.post(prompt=["a", "b", "c"], max_tokens=1)
            assert reply.status_code == 429
            assert harness.service.loop.num_streams == MAX_ROWS
            brake.release()
            await asyncio.gather(*held)
            reply = await harness.post(prompt=["a", "b", "c"], max_tokens=1)
            assert reply.status_code == 200

    run(main())


# Some megabytes: far more than the buffers of two sockets that are kept small.
FLOOD = {
    **GREEDY,
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 480,
    "n": 4,
    "logprobs": True,
    "top_logprobs": 20,
    "stream": True,
}


async def flood(harness: HttpHarness, writer: asyncio.StreamWriter) -> Stream:
    """Request a long output and read none of it; returns its stream."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while not (connections := harness.server._server.server_state.connections):
        await asyncio.sleep(0.005)
    for server_side in connections:
        sock = server_side.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    writer.write(http_post(FLOOD, "/v1/chat/completions"))
    while not (streams := list(harness.service.loop._streams.values())):
        await asyncio.sleep(0.005)
    return streams[0]


async def rest_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """The bytes received until the connection was closed or reset."""
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(2**16):
            parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")


def test_client_that_reads_nothing_is_cut_off_in_time(engine):
    async def main():
        limits = LimitsConfig(send_timeout_s=0.5, max_unread_tokens=10**6)
        async with (
            http_harness(engine, limits) as harness,
            connection(harness, 4096) as (reader, writer),
        ):
            stream = await flood(harness, writer)
            assert len((await harness.complete(max_tokens=50))["choices"]) == 1
            while harness.server.num_connections > 1:  # the other is the HTTP client's
                await asyncio.sleep(0.02)
            assert stream.is_finished
            await harness.idle()
            text = await rest_of(reader, writer)
            assert text.count("data: ") < 400 and "[DONE]" not in text

    run(main())


def test_slow_reader_loses_its_request_and_pages(engine):
    async def main():
        limits = LimitsConfig(max_unread_tokens=100)
        async with (
            http_harness(engine, limits) as harness,
            connection(harness, 4096) as (reader, writer),
        ):
            stream = await flood(harness, writer)
            while stream.error is None:
                await asyncio.sleep(0.02)
            assert stream.error.kind is ErrorKind.SLOW_READER
            await harness.idle()
            text = await rest_of(reader, writer)
            assert "serving.limits.max_unread_tokens" in text and "[DONE]" not in text

    run(main())


def test_missing_body_times_out(engine):
    async def main():
        limits = LimitsConfig(send_timeout_s=0.2)
        async with http_harness(engine, limits) as harness, connection(harness) as (reader, writer):
            writer.write(http_post({}, body=b"{").replace(b"Length: 1", b"Length: 9"))
            answer = await reader.read(-1)
            assert answer.startswith(b"HTTP/1.1 408") and b"0.2 s" in answer

    run(main())


def test_unfinished_headers_time_out(engine):
    async def main():
        async with http_harness(engine, keepalive_s=1.0) as harness:
            for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "):
                async with connection(harness) as (reader, writer):
                    writer.write(sent)
                    assert await reader.read(-1) == b""

    run(main())


def test_disconnect_while_sending_costs_nothing(engine):
    async def main():
        async with http_harness(engine) as harness:
            async with connection(harness) as (_, writer):
                writer.write(http_post({}).replace(b"Length: 2", b"Length: 1000"))
                await writer.drain()
                await harness.complete(max_tokens=1)
            while harness.server.num_connections > 1:
                await asyncio.sleep(0.005)
            assert harness.service.loop.num_streams == 0

    run(main())


def test_stop_aborts_what_does_not_finish_in_time(engine, brake):
    async def main():
        async with http_harness(engine) as harness:
            brake.seconds = 0.01
            async with connection(harness) as (reader, writer):
                fields = {**GREEDY, "prompt": "x", "max_tokens": 480, "stream": True}
                writer.write(http_post(fields))
                await reader.readuntil(b"data: ")
                start = time.monotonic()
                await harness.server.stop(0.1)
                assert time.monotonic() - start < 5
                assert b"[DONE]" not in await reader.read(-1)
                await harness.idle()

    run(main())


def test_stop_waits_for_what_finishes_in_time(engine, brake):
    async def main():
        async with http_harness(engine) as harness:
            brake.seconds = 0.005
            async with connection(harness) as (reader, writer):
                fields = {**GREEDY, "prompt": "x", "max_tokens": 40, "stream": True}
                writer.write(http_post(fields))
                await reader.readuntil(b"data: ")
                await harness.server.stop(30)
                assert b"[DONE]" in await reader.read(-1)
                with pytest.raises(OSError):
                    async with connection(harness):
                        pass

    run(main())


def test_port_in_use_is_an_error_that_names_it(engine):
    async def main():
        async with http_harness(engine) as harness:
            port = int(harness.url.rpartition(":")[2])
            with pytest.raises(OSError, match=str(port)):
                async with http_harness(engine, http_port=port):
                    pass

    run(main())


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_receives_the_events_of_a_stream(engine):
    async def main():
        async with http_harness(engine) as harness:
            fields = {**GREEDY, "prompt": "the", "max_tokens": 5, "stream": True}
            process = await asyncio.create_subprocess_exec(
                *(
                    "curl",
                    "--silent",
                    "--show-error",
                    "--no-buffer",
                    f"{harness.url}/v1/completions",
                ),
                *("--header", "Content-Type: application/json", "--data", json.dumps(fields)),
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate()
            *events, done = events_of(output.decode())
            assert done == "[DONE]" and process.returncode == 0
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            assert text == (await harness.complete("the", max_tokens=5))["choices"][0]["text"]

    run(main())
