"""One answer over HTTP: the requests behind it, started, watched and sent, by one response object.

Starlette's own streaming response runs a task group and wraps what it is given for every chunk;
here a chunk is ready-made bytes, and a request has one task beside its own: the one that waits for
the client to leave.

The headers go out with the first token, so whatever fails before it has its true status. After it,
an error is an event of its own, and the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Protocol

from absl import logging
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import Delta, GenerationRequest, Result
from jaxinfer.serving.http.errors import internal_error, json_response, service_error_json
from jaxinfer.serving.service import Service
from jaxinfer.serving.stream import Stream

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # proxies that know it pass each event on at once
]

Batch = list[tuple[int, Delta]]  # (which request, what it brought)


class ResponseSerializer(Protocol):
    """How an endpoint writes what its streams bring. `number` counts the requests of the answer."""

    def event(self, number: int, stream: Stream, delta: Delta) -> bytes:
        """One delta as an event; empty where it has nothing to show."""
        ...

    def last_events(self, streams: Sequence[Stream]) -> bytes:
        """What comes after all deltas and before `[DONE]`."""
        ...

    def whole(self, streams: Sequence[Stream], results: Sequence[Result]) -> bytes:
        """The answer in one piece."""
        ...


class GenerationResponse(Response):
    """The answer to `requests`: their events as they come, or one JSON body at the end.

    All requests are taken or none. Each is cancelled at once when the client leaves, when another
    one fails, and when sending does. Raises the `ServiceError` of a request as long as nothing has
    been sent, with fields named as the endpoint does (`field_names`).
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[GenerationRequest],
        serializer: ResponseSerializer,
        *,
        is_stream: bool,
        field_names: Mapping[str, str],
    ):
        self.background = None
        self._service = service
        self._requests = requests
        self._serializer = serializer
        self._is_stream = is_stream
        self._field_names = field_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._renamed():
            streams = await submit_all(self._service, self._requests)
        scope["state"]["has_stream"] = True
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, streams))
        try:
            if self._is_stream:
                await self._send_events(streams, send)
            else:
                with self._renamed():
                    results = await collect_all(streams)
                body = self._serializer.whole(streams, results)
                await json_response(body)(scope, receive, send)
        except ServiceError as error:
            if error.kind is not ErrorKind.CANCELLED or not watcher.done():
                raise
            # The client has left; nobody reads an answer.
        finally:
            for stream in streams:
                stream.cancel()
            watcher.cancel()
            await asyncio.wait((watcher,))

    async def _send_events(self, streams: Sequence[Stream], send: Send) -> None:
        has_started = False
        try:
            async with contextlib.aclosing(batches(streams)) as source:
                async for batch in source:
                    if not has_started:
                        has_started = True
                        start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                        await send(start)
                    events = [self._serializer.event(i, streams[i], delta) for i, delta in batch]
                    data = b"".join(events)
                    if data:
                        await send(_body(data))
            await send(_body(self._serializer.last_events(streams) + DONE, is_last=True))
        except ServiceError as error:
            if not has_started:
                raise
            await send(_body(_error_event(service_error_json(error)), is_last=True))
        except Exception:
            if not has_started:
                raise
            logging.exception("request %s, in its stream", streams[0].id)
            await send(_body(_error_event(internal_error()[1]), is_last=True))

    @contextlib.contextmanager
    def _renamed(self) -> Iterator[None]:
        try:
            yield
        except ServiceError as error:
            name = self._field_names.get(error.field or "")
            if name is None:
                raise
            raise ServiceError(
                error.kind, error.message, field=name, retry_after_s=error.retry_after_s
            ) from error


async def submit_all(service: Service, requests: Sequence[GenerationRequest]) -> list[Stream]:
    """Queue all of them, or none and raise why."""
    if len(requests) > 1:
        num_samples = sum(request.params.n for request in requests)
        try:
            service.loop.check_capacity(num_samples)
        except ServiceError as error:
            if error.kind is not ErrorKind.INVALID:
                raise
            text = f"{len(requests)} prompts: {error.message}"
            raise ServiceError(ErrorKind.INVALID, text, field="prompt") from error
    streams: list[Stream] = []
    try:
        for request in requests:
            streams.append(await service.generate(request))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


async def collect_all(streams: Sequence[Stream]) -> list[Result]:
    """Read all to their ends, side by side: one that is not read would count as a slow reader's."""
    if len(streams) == 1:
        return [await streams[0].collect()]
    tasks = [asyncio.create_task(stream.collect()) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def batches(streams: Sequence[Stream]) -> AsyncGenerator[Batch]:
    """What the streams bring, as it comes: all that is there at a time in one piece."""
    if len(streams) == 1:
        async for batch in _batches_of(0, streams[0]):
            yield batch
        return
    # Room for one: what nobody reads stays in the streams, whose limits hold.
    queue: asyncio.Queue[Batch | None] = asyncio.Queue(1)

    async def pump(number: int) -> None:
        async for batch in _batches_of(number, streams[number]):
            await queue.put(batch)
        await queue.put(None)

    tasks = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    for task in tasks:
        task.add_done_callback(lambda task: _wake_for_error(task, queue))
    try:
        num_left = len(tasks)
        while num_left:
            batch = await queue.get()
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error
            if batch is None:
                num_left -= 1
            else:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _wake_for_error(task: asyncio.Task[None], queue: asyncio.Queue[Batch | None]) -> None:
    if not task.cancelled() and task.exception() is not None and queue.empty():
        queue.put_nowait(None)


async def _batches_of(number: int, stream: Stream) -> AsyncGenerator[Batch]:
    async for delta in stream:
        batch = [(number, delta)]
        while stream.num_unread:
            batch.append((number, await anext(stream)))
        yield batch


async def _cancel_on_disconnect(receive: Receive, streams: Sequence[Stream]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    for stream in streams:
        stream.cancel()


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def _error_event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
