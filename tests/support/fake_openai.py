"""An OpenAI-compatible endpoint for tests of clients, with responses that each test defines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Answer = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request as the server sees it, and the means to respond."""

    def __init__(self, path: str, body: Any, writer: asyncio.StreamWriter):
        self.path = path
        self.body = body
        self._writer = writer

    def start(self) -> None:
        """Send the head of a stream."""
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        self.write((head + "Transfer-Encoding: chunked\r\n\r\n").encode())

    def event(self, data: object) -> None:
        payload = data if isinstance(data, str) else json.dumps(data)
        chunk = f"data: {payload}\n\n".encode()
        self.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))

    def text(self, text: str) -> None:
        self.event({"choices": [{"index": 0, "text": text}]})

    def end(self, prompt_tokens: int = 3, completion_tokens: int = 0) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self.finish()

    def finish(self) -> None:
        self.write(b"0\r\n\r\n")

    def reply(self, status: str, body: str, headers: str = "") -> None:
        data = body.encode()
        head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
        self.write(head.encode() + data)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def cut(self) -> None:
        self._writer.transport.abort()


class FakeServer:
    """An OpenAI-compatible endpoint; `answer` responds to each request."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self.seen: list[Exchange] = []
        self.num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [x for x in head.split("\r\n") if x.lower().startswith("content-length")]
                body = await reader.readexactly(int(length[0].split(":")[1])) if length else b"{}"
                self.seen.append(Exchange(head.split(" ")[1], json.loads(body), writer))
                await self._answer(self.seen[-1])
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client disconnected, or the test ended
        finally:
            writer.transport.abort()
            self._tasks.discard(task)


def answers(*texts: str) -> Answer:
    """A stream of these texts, one a token."""

    async def answer(exchange: Exchange) -> None:
        exchange.start()
        for text in texts:
            exchange.text(text)
        exchange.end(completion_tokens=len(texts))

    return answer
