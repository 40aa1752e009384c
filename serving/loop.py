"""Connects asyncio and the engine: one thread owns the engine, the event loop owns the clients.

    protocol -> EngineLoop.submit -> inbox ==> engine thread: add, step, abort, expire
    protocol <- Stream            <- outbox <== one call into the event loop a step

Each of these rules has a test:

* **Inbox.** A request is accepted while fewer than `scheduler.max_num_seqs + limits.max_waiting`
  samples (for an encoder: texts, `max_waiting_texts`) are unfinished, and while the prompts without
  a first token stay within `limits.max_waiting_tokens`; else it is refused at once (OVERLOADED).
* **Outbox.** Unread output is joined into one delta a sample, so that it grows with its tokens
  alone. If a client leaves more than `limits.max_unread_tokens` of them unread, its request is
  cancelled (SLOW_READER); other requests do not wait for it.
* **Cancellation.** `Stream.cancel` aborts the request before the next step, which frees its pages.
* **Deadline.** It is a timer of the event loop; when it fires, the request is aborted before the
  next step. A request whose deadline passes before the engine adds it is never added.
* **Failure.** If the engine raises in a step, or `fail` is called, every stream ends with that
  error, and no further request is accepted.

All methods are for the event loop's thread, unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from absl import logging

from jaxinfer import EngineLike, InvalidRequestError
from jaxinfer.engine.outputs import Update
from jaxinfer.engine.request import Request, TokenLogprobs
from jaxinfer.engine.stats import EngineStats
from jaxinfer.parallel.hosts import HostsError
from jaxinfer.serving.admission import AdmissionQuota
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import Delta, GenerationRequest
from jaxinfer.serving.observer import Observer, Observers
from jaxinfer.serving.stream import Stream


class StepResult(NamedTuple):
    """The output of one step for one sample; created in the engine's thread."""

    stream: Stream
    delta: Delta
    request: Request


class EngineLoop:
    """Runs an engine in a thread of its own, for the event loop in which `start` is called.

    `on_fatal(error)` is called in the event loop when the engine's thread has ended by an error.
    """

    def __init__(
        self,
        engine: EngineLike,
        limits: LimitsConfig | None = None,
        *,
        observers: tuple[Observer, ...] = (),
        on_fatal: Callable[[BaseException], None] = lambda error: None,
    ):
        self.engine = engine
        self.limits = limits or LimitsConfig()
        self.stats = engine.stats  # as of the last step
        self.failure: ServiceError | None = None  # once set, no request is served
        self.is_draining = False
        self.step_started: float | None = (
            None  # monotonic time, for the watchdog; None: no step runs
        )
        self._observers = Observers(observers)
        self._on_fatal = on_fatal
        self._quota = AdmissionQuota(engine, self.limits)
        self._num_waiting_tokens = 0  # the prompt tokens of requests without a first token
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

        # Actions for the engine's thread, each with its stream.
        self._inbox: collections.deque[tuple[Callable[[Stream], None], Stream]]
        self._inbox = collections.deque()
        self._wakeup = threading.Event()
        self._is_stopping = False
        # The engine thread's: the stream and index of each sample, by the engine's id, which is
        # unique and not chosen by a client.
        self._running: dict[str, tuple[Stream, int]] = {}
        self._samples: dict[Stream, list[Request]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread; deltas are delivered in the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_streams(self) -> int:
        """The number of unfinished requests."""
        return len(self._streams)

    @property
    def is_alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    def check_capacity(self, num_samples: int = 1) -> None:
        """Raise the error of `submit` for a full queue, before any work is done for the request."""
        if self.failure is not None:
            raise self.failure
        if self.is_draining:
            raise ServiceError(
                ErrorKind.UNAVAILABLE,
                "the server is shutting down; try another, or this one when it is back",
                retry_after_s=5.0,
            )
        self._quota.check(num_samples)

    @contextlib.contextmanager
    def reserve(self, num_samples: int) -> Iterator[Callable[[], None]]:
        """Reserve capacity while a request is prepared; raises as `check_capacity`.

        Without a reservation all requests that are prepared at once would find the same capacity.
        Each call of the result releases one sample's, for a `submit` right after it.
        """
        self.check_capacity(num_samples)
        with self._quota.reserve(num_samples) as release_one:
            yield release_one

    def submit(
        self, request: GenerationRequest, prompt_token_ids: list[int], *, submitted_at: float
    ) -> Stream:
        """Queue a request; raises `ServiceError` at once if it cannot be served.

        Its deadline and its latencies count from `submitted_at`, by the monotonic clock.
        """
        params = request.params
        self.check_capacity(params.n)
        num_waiting = self._num_waiting_tokens + len(prompt_token_ids)
        if self._num_waiting_tokens and num_waiting > self.limits.max_waiting_tokens:
            raise ServiceError(
                ErrorKind.OVERLOADED,
                f"{self._num_waiting_tokens} prompt tokens wait and {len(prompt_token_ids)} more "
                f"would pass serving.limits.max_waiting_tokens "
                f"({self.limits.max_waiting_tokens}); try again later",
                retry_after_s=1.0,
            )
        try:
            self.engine.check(prompt_token_ids, params, priority=request.priority)
        except InvalidRequestError as error:
            raise ServiceError(ErrorKind.INVALID, str(error), field=error.field) from error
        request_id = self._request_id(request)
        timeout_s = self.limits.timeout_s if request.timeout_s is None else request.timeout_s
        if not 0 <= timeout_s <= self.limits.timeout_s:  # NaN too
            raise ServiceError(
                ErrorKind.INVALID,
                f"timeout_s is {timeout_s}; it must be a number of seconds from 0 to "
                f"{self.limits.timeout_s} (serving.limits.timeout_s)",
                field="timeout_s",
            )
        stream = Stream(
            request, request_id, prompt_token_ids, submitted_at, on_cancel=self._on_cancel
        )
        stream.deadline = deadline = submitted_at + timeout_s
        self._streams[request_id] = stream
        self._quota.num_used += params.n
        self._num_waiting_tokens += len(prompt_token_ids)
        self._is_idle.clear()
        delay = max(0.0, deadline - time.monotonic())
        stream.timer = self._event_loop.call_later(delay, self._on_deadline, stream)
        self._enqueue(self._add, stream)
        return stream

    def end(self, stream: Stream, error: ServiceError) -> None:
        """End a stream with `error` and abort its request; no effect once it has ended."""
        if self._release(stream):
            stream.fail(error)
            self._enqueue(self._abort, stream)
            self._record_end(stream)

    def fail(self, error: ServiceError) -> None:
        """End all streams with `error` and refuse further requests; the thread is left as it is."""
        if self.failure is None:
            self.failure = error
        for stream in list(self._streams.values()):
            if self._release(stream):
                stream.fail(error)
                self._record_end(stream)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others; False: the timeout cut some off."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
            return True
        except TimeoutError:
            text = f"the server shut down before the request was done ({timeout_s} s to drain)"
            for stream in list(self._streams.values()):
                self.end(stream, ServiceError(ErrorKind.UNAVAILABLE, text, retry_after_s=5.0))
            return False

    async def stop(self) -> None:
        """End the engine's thread; unfinished requests end as UNAVAILABLE."""
        self.is_draining = True
        for stream in list(self._streams.values()):
            self.end(stream, ServiceError(ErrorKind.UNAVAILABLE, "the server has stopped"))
        self._is_stopping = True
        self._wakeup.set()
        if self.failure is None and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _request_id(self, request: GenerationRequest) -> str:
        if request.request_id is not None:
            if request.request_id in self._streams:
                raise ServiceError(
                    ErrorKind.IN_USE,
                    f"request id {request.request_id!r} is in use; choose another",
                    field="request_id",
                )
            return request.request_id
        while (name := f"{request.protocol or 'request'}-{next(self._ids)}") in self._streams:
            pass
        return name

    def _enqueue(self, action: Callable[[Stream], None], stream: Stream) -> None:
        self._inbox.append((action, stream))
        self._wakeup.set()

    def _release(self, stream: Stream) -> bool:
        """Remove a stream and release its capacity; False if that has happened already."""
        if self._streams.get(stream.id) is not stream:
            return False
        del self._streams[stream.id]
        self._quota.num_used -= stream.num_unfinished
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.timing.first_token_s is None:
            self._num_waiting_tokens -= len(stream.prompt_token_ids)
        if not self._streams:
            self._is_idle.set()
        return True

    def _record_end(self, stream: Stream) -> None:
        stream.timing.total_s = time.monotonic() - stream.submitted_at
        self._observers.end(stream)

    def _deliver(self, results: list[StepResult], stats: EngineStats) -> None:
        """Hand the results of a step to their streams, in the event loop."""
        self.stats = stats
        self._observers.step(stats)
        now = time.monotonic()
        for stream, delta, request in results:
            if self._streams.get(stream.id) is stream:
                self._apply(stream, delta, request, now)

    def _apply(self, stream: Stream, delta: Delta, request: Request, now: float) -> None:
        timing, usage = stream.timing, stream.usage
        if timing.first_token_s is None:
            timing.first_token_s = now - stream.submitted_at
            self._num_waiting_tokens -= len(stream.prompt_token_ids)
            usage.cached_tokens = request.prefix.hit_len or 0
            if request.started_at is not None:
                timing.queue_s = request.started_at - stream.submitted_at
            if request.params.prompt_logprobs is not None:
                positions = range(request.prompt_len)
                stream.prompt_logprobs = [request.logprobs.prompt.get(i) for i in positions]
        usage.output_tokens += len(delta.token_ids)
        stream.push(delta)
        self._observers.delta(stream, delta)
        if delta.finish_reason is not None:
            stream.num_unfinished -= 1
            self._quota.num_used -= 1
            if stream.num_unfinished == 0 and self._release(stream):
                self._record_end(stream)
                return
        if stream.num_unread > self.limits.max_unread_tokens:
            text = (
                f"{stream.num_unread} tokens wait to be read, more than "
                f"serving.limits.max_unread_tokens ({self.limits.max_unread_tokens}); read faster"
            )
            self.end(stream, ServiceError(ErrorKind.SLOW_READER, text))

    def _on_cancel(self, stream: Stream) -> None:
        text = f"request {stream.id!r} was cancelled"
        self.end(stream, ServiceError(ErrorKind.CANCELLED, text))

    def _on_deadline(self, stream: Stream) -> None:
        text = f"request {stream.id!r} was not done by its deadline"
        self.end(stream, ServiceError(ErrorKind.DEADLINE, text))

    def _on_refused(self, stream: Stream, error: Exception) -> None:
        """End a stream whose request the engine refused when it was added."""
        if isinstance(error, InvalidRequestError):
            failure = ServiceError(ErrorKind.INVALID, str(error), field=error.field)
        else:
            failure = ServiceError(ErrorKind.INTERNAL, "the engine could not take the request")
        self.end(stream, failure)

    def _on_thread_error(self, error: BaseException) -> None:
        text = f"the engine has stopped: {type(error).__name__}: {error}"
        self.fail(ServiceError(ErrorKind.INTERNAL, text))
        self._on_fatal(error)

    # The methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._read_inbox()
                if self.engine.has_requests:
                    self._step()
                else:
                    self._wakeup.wait()
            self._read_inbox()  # the aborts of unfinished requests
        except (
            HostsError
        ) as error:  # another process failed: a stack trace here would not explain it
            self._call(self._on_thread_error, error)
        except BaseException as error:
            logging.exception("the engine's thread failed")
            self._call(self._on_thread_error, error)

    def _read_inbox(self) -> None:
        self._wakeup.clear()
        while self._inbox:
            action, stream = self._inbox.popleft()
            action(stream)

    def _add(self, stream: Stream) -> None:
        # It was cancelled while queued, or its deadline has passed, which its timer reports.
        if stream.is_finished or stream.deadline <= time.monotonic():
            return
        request = stream.request
        try:
            samples = self.engine.add(
                stream.prompt_token_ids,
                request.params,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                logging.exception("request %s", stream.id)
            self._call(self._on_refused, stream, error)
            return
        self._samples[stream] = samples
        for index, sample in enumerate(samples):
            self._running[sample.id] = stream, index

    def _abort(self, stream: Stream) -> None:
        for sample in self._samples.pop(stream, ()):
            self._running.pop(sample.id, None)
            self.engine.abort(sample.id)

    def _step(self) -> None:
        self.step_started = time.monotonic()
        updates = self.engine.step()
        self.step_started = None
        results = [self._result(update) for update in updates if update.request.id in self._running]
        self._call(self._deliver, results, self.engine.stats)

    def _result(self, update: Update) -> StepResult:
        request = update.request
        stream, index = self._running[request.id]
        logprobs: list[TokenLogprobs] = []
        if request.params.logprobs is not None and update.token_ids:
            logprobs = request.logprobs.output[-len(update.token_ids) :]
        if update.finish_reason is not None:
            del self._running[request.id]
            if not any(s.id in self._running for s in self._samples[stream]):
                del self._samples[stream]
        new = update.text, update.token_ids, logprobs, update.finish_reason, update.embedding
        return StepResult(stream, Delta(index, *new), request)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Run `function` in the event loop, or stop the thread if the loop is closed."""
        try:
            self._event_loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._is_stopping = True
