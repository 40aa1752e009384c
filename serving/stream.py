"""One request under way, as its client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from jaxinfer.engine.request import TokenLogprobs
from jaxinfer.serving.errors import ServiceError
from jaxinfer.serving.generation import Delta, GenerationRequest, Result, Timing, Usage


class Stream:
    """One request under way: an asynchronous iterator of deltas, of all its samples as they come.

    It ends after every sample's last delta, or raises the `ServiceError` that ended it (again, if
    read again). Whoever stops reading before the end has to `cancel`.
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
        self.submitted_at = submitted_at  # by the monotonic clock
        self.deadline = submitted_at  # for the loop: set when it takes the request
        self.usage = Usage(len(prompt_token_ids))
        self.timing = Timing()
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.error: ServiceError | None = None
        self.num_unfinished = request.params.n
        self._on_cancel = on_cancel
        self._unread: dict[int, list[Delta]] = {}  # by sample
        self._num_unread = 0  # tokens
        self._wake = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None  # for the loop: rings at the deadline

    @property
    def is_finished(self) -> bool:
        """Nothing more will come; deltas may still be unread."""
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
        """Read it to the end: the whole answer."""
        parts: dict[int, list[Delta]] = {}
        async for delta in self:
            parts.setdefault(delta.index, []).append(delta)
        samples = [Delta.joined(parts[i]) for i in sorted(parts)]
        return Result(samples, self.prompt_logprobs, self.usage, self.timing)

    def cancel(self) -> None:
        """Give it up; no effect once it has ended."""
        self._on_cancel(self)

    def push(self, delta: Delta) -> None:
        """For the loop: hand over what has come; returns at once."""
        self._unread.setdefault(delta.index, []).append(delta)
        self._num_unread += len(delta.token_ids)
        self._wake.set()

    def fail(self, error: ServiceError) -> None:
        """For the loop: it ends with `error`; what is unread is dropped."""
        self.error = error
        self._unread.clear()
        self._num_unread = 0
        self._wake.set()

    @property
    def num_unread(self) -> int:
        """Tokens that have come and have not been read."""
        return self._num_unread
