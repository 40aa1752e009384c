"""The HTTP response to a request to generate: one JSON body, or a stream of server-sent events.

Starlette's own streaming response runs a task group and wraps every chunk. Here a chunk is bytes
already, and a request needs one further task, which waits for the client to disconnect.

The headers go out with the first token, so a failure before it has its own status. A later failure
is sent as an event, and the stream ends without `[DONE]`.
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
from jaxinfer.serving.http.serialization import event
from jaxinfer.serving.service import Service
from jaxinfer.serving.stream import Stream

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # proxies that know it do not buffer events
]

Batch = list[tuple[int, Delta]]  # (number of the request, delta)


class ResponseSerializer(Protocol):
    """Writes the response of an endpoint. `number` is a request's position in the response."""

    def event(self, number: int, stream: Stream, delta: Delta) -> bytes:
        """The event of one delta; empty if the delta shows nothing."""
        ...

    def last_events(self, streams: Sequence[Stream]) -> bytes:
        """The events after all deltas and before `[DONE]`."""
        ...

    def whole(self, streams: Sequence[Stream], results: Sequence[Result]) -> bytes:
        """The body of a response that is not streamed."""
        ...


class GenerationResponse(Response):
    """The response to `requests`: their events as they arrive, or one JSON body at the end.

    Either all requests are queued or none. All are cancelled at once when the client disconnects,
    when one of them fails, and when sending fails. As long as nothing has been sent, the
    `ServiceError` of a request is raised, with the field names of the endpoint: `field_names` maps
    the service's names to them.
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
        with self._endpoint_field_names():
            streams = await submit_all(self._service, self._requests)
        scope["state"]["has_stream"] = True
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, streams))
        try:
            if self._is_stream:
                await self._send_events(streams, send)
            else:
                with self._endpoint_field_names():
                    results = await collect_all(streams)
                body = self._serializer.whole(streams, results)
                await json_response(body)(scope, receive, send)
        except ServiceError as error:
            if error.kind is not ErrorKind.CANCELLED or not watcher.done():
                raise
            # The client has disconnected: nobody reads a response.
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
            await send(_body(event(service_error_json(error)), is_last=True))
        except Exception:
            if not has_started:
                raise
            logging.exception("request %s failed while it was streamed", streams[0].id)
            await send(_body(event(internal_error()[1]), is_last=True))

    @contextlib.contextmanager
    def _endpoint_field_names(self) -> Iterator[None]:
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
    """Queue all requests; if one is refused, queue none and raise its error."""
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
    """Read all streams to their ends, concurrently: an unread one would count as a slow reader."""
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
    """The deltas of the streams as they arrive, those that are available together in one batch."""
    if len(streams) == 1:
        async for batch in _batches_of(0, streams[0]):
            yield batch
        return
    # One batch at most: unread deltas stay in their streams, where the limits apply.
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
