"""The output stream of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from jaxinfer.engine.request import TokenLogprobs
from jaxinfer.serving.errors import ServiceError
from jaxinfer.serving.generation import Delta, GenerationRequest, Result, Timing, Usage


class Stream:
    """An asynchronous iterator of the deltas of one request, of all its samples as they arrive.

    It ends after the last delta of every sample, or raises the `ServiceError` that ended the
    request, at every further read too. A reader that stops before the end has to `cancel`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt_token_ids: list[int],
        submitted_at: float,
        *,
        on_cancel: Callable[[Stream], None],
    ):
        self.id = request_id
        self.request = request
        self.prompt_token_ids = prompt_token_ids
        self.submitted_at = submitted_at  # monotonic time
        self.deadline = submitted_at  # set by the loop when it accepts the request
        self.usage = Usage(len(prompt_token_ids))
        self.timing = Timing()
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.error: ServiceError | None = None
        self.num_unfinished = request.params.n
        self._on_cancel = on_cancel
        self._unread: dict[int, list[Delta]] = {}  # keyed by sample
        self._num_unread = 0  # tokens
        self._wake = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None  # the loop's, of the deadline

    @property
    def is_finished(self) -> bool:
        """No further delta will arrive; some may still be unread."""
        return self.error is not None or self.num_unfinished == 0

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._unread:
            if self.error is not None:
                raise self.error
            if self.num_unfinished == 0:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        delta = Delta.joined(self._unread.pop(next(iter(self._unread))))
        self._num_unread -= len(delta.token_ids)
        return delta

    async def collect(self) -> Result:
        """Read to the end and return the complete output."""
        parts: dict[int, list[Delta]] = {}
        async for delta in self:
            parts.setdefault(delta.index, []).append(delta)
        samples = [Delta.joined(parts[i]) for i in sorted(parts)]
        return Result(samples, self.prompt_logprobs, self.usage, self.timing)

    def cancel(self) -> None:
        """Cancel the request; no effect once it has ended."""
        self._on_cancel(self)

    def push(self, delta: Delta) -> None:
        """Add a delta; for the loop."""
        self._unread.setdefault(delta.index, []).append(delta)
        self._num_unread += len(delta.token_ids)
        self._wake.set()

    def fail(self, error: ServiceError) -> None:
        """End with `error` and drop unread deltas; for the loop."""
        self.error = error
        self._unread.clear()
        self._num_unread = 0
        self._wake.set()

    @property
    def num_unread(self) -> int:
        """The number of tokens that have arrived and have not been read."""
        return self._num_unread
