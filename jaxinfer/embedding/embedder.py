"""The engine of encoder models: it batches texts and computes their embedding vectors.

    batch   = waiting.take()            the oldest text, and others that fit in its batch
    output  = embed(weights, batch)     one jitted program: encoder and pooling; returns at once
    updates = the previous batch's vectors, read while this one runs

A text's vector does not depend on the other texts in its batch, except for rounding: XLA sums in a
different order for each batch shape. The class has the methods that the serving loop calls on an
`Engine`, and like an `Engine` it is not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxinfer.config import EngineConfig
from jaxinfer.embedding.pooling import pool
from jaxinfer.embedding.text_batches import (
    TextBatch,
    TextBucket,
    WaitingTexts,
    buckets_for,
    check_encoder_config,
)
from jaxinfer.engine.admission import InvalidRequestError
from jaxinfer.engine.outputs import Update
from jaxinfer.engine.request import FinishReason, Rank, Request
from jaxinfer.engine.stats import EngineStats, StepStats
from jaxinfer.execution.compile import compile_program, compile_programs
from jaxinfer.execution.numerics import check_numerics, check_weights
from jaxinfer.loading.sentence_options import SentenceOptions
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.options import ConfigError
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer

EMBEDDING_PARAMS = SamplingParams(max_tokens=0)


# The model and its pooling modes are static; nothing is donated. Each bucket is one variant,
# compiled ahead of time.
@partial(jax.jit, static_argnames=("model", "modes"))
def embed(weights, token_ids, lengths, *, model, modes):
    return pool(model.merge(weights)(token_ids, lengths), lengths, modes)


class _InFlight(NamedTuple):
    batch: TextBatch
    output: jax.Array  # [rows, D]


class Embedder:
    """Compute embedding vectors with one encoder model (see the module docstring).

    Without a `tokenizer`, texts must be given as token ids. Raises `ConfigError` for options that
    an encoder cannot honour.
    """

    can_generate = False

    def __init__(
        self,
        model: FunctionalModel,
        weights: Weights,
        config: EngineConfig | None = None,
        options: SentenceOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        name: str = "",
    ):
        self.config = config = config or EngineConfig()
        check_numerics(config, model.numerics)
        check_weights(config, weights)
        check_encoder_config(config)
        self.model = model
        self.options = options or SentenceOptions()
        self.tokenizer = tokenizer
        self.name = name
        self.max_model_len = self._max_model_len()
        self.embedding_dim = model.config.model_dim * len(self.options.pooling)
        self.buckets = buckets_for(config, self.max_model_len)
        self.last_step = StepStats()
        self.num_computed = 0  # tokens run through the model, without padding
        self.num_steps = 0
        self.num_late_compiles = 0
        self.compile_seconds = 0.0
        self.weights = weights
        self._programs: dict[TextBucket, Any] = {}
        self._is_warm = False
        self._requests: dict[str, Request] = {}  # unfinished ones, by id
        self._waiting = WaitingTexts(self.buckets)
        self._in_flight: _InFlight | None = None
        self._num_added = 0

    def _max_model_len(self) -> int:
        num_positions, requested = self.model.config.max_len, self.config.max_model_len
        if requested is not None and requested > num_positions:
            raise ConfigError(
                f"max_model_len is {requested}; this encoder has {num_positions} positions: lower "
                "it or leave it out"
            )
        return requested or min(self.options.max_len or num_positions, num_positions)

    @property
    def replicas(self) -> tuple[Any, ...]:
        """An embedder has no replicas."""
        return ()

    @property
    def num_programs(self) -> int:
        """The number of programs that `warm_up` compiles."""
        return len(self.buckets)

    @property
    def has_requests(self) -> bool:
        """Whether there is work left for `step`."""
        return bool(self._requests or self._in_flight)

    @property
    def num_requests(self) -> int:
        """The number of unfinished texts."""
        return len(self._requests)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the statistics; an encoder has no pages and generates no tokens."""
        num_running = 0 if self._in_flight is None else len(self._in_flight.batch.requests)
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, len(self._requests) - num_running),
            num_pages=0,
            num_owned_pages=0,
            num_cached_pages=0,
            num_steps=self.num_steps,
            num_computed=self.num_computed,
            num_generated=0,
            num_shared=0,
            num_preemptions=0,
            num_compiled=len(self._programs),
            num_late_compiles=self.num_late_compiles,
            last_step=self.last_step,
        )

    def warm_up(self, on_progress: Callable[[str], None] = lambda program: None) -> None:
        """Compile every program; `on_progress` is called with the name of each finished one."""
        started = time.perf_counter()

        def done(bucket: TextBucket, program: Any) -> None:
            self._programs[bucket] = program
            on_progress(f"embed[{bucket.rows} x {bucket.length}]")

        compile_programs({b: partial(self._lower, b) for b in self.buckets[::-1]}, done)
        # `_programs` keeps the compiled programs.
        embed.clear_cache()  # type: ignore[attr-defined]  # a method of jitted functions
        self.compile_seconds += time.perf_counter() - started
        self._is_warm = True

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams = EMBEDDING_PARAMS,
        *,
        priority: int = 0,
    ) -> None:
        """Raise the `InvalidRequestError` that `add` would raise. Any thread may call this."""
        num_tokens, vocab_size = len(prompt_token_ids), self.model.config.vocab_size
        if priority:
            raise InvalidRequestError(
                f"priority is {priority}, but an encoder serves requests in order of arrival; "
                "leave it out",
                "priority",
            )
        if not num_tokens:
            raise InvalidRequestError("the text is empty; it needs at least one token", "prompt")
        if num_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"the text has {num_tokens} tokens; this model takes {self.max_model_len}: shorten "
                "it, or set truncate",
                "prompt",
            )
        for position, token_id in enumerate(prompt_token_ids):
            is_int = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"token {token_id!r} at position {position} is outside the vocabulary "
                    f"[0, {vocab_size})",
                    "prompt",
                )

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams = EMBEDDING_PARAMS,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Request]:
        """Queue a text as one request.

        Nothing is sampled or cached, so `params` and `cache_salt` are ignored. Raises
        `InvalidRequestError` and leaves the state unchanged if the text is invalid.
        """
        self.check(prompt_token_ids, params, priority=priority)
        request = Request(
            f"text-{self._num_added}",
            prompt_token_ids,
            params,
            max_len=len(prompt_token_ids),
            rank=Rank(arrival=self._num_added),
        )
        self._num_added += 1
        self._requests[request.id] = request
        self._waiting.add(request)
        return [request]

    def abort(self, request_id: str) -> bool:
        """End a request now, without an update. Return False if it is unknown or has finished."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.finish_reason = FinishReason.ABORT
        return True

    def step(self) -> list[Update]:
        """Start one batch and read the previous one; return an update for each text of the latter.

        Each update carries its text's `embedding`. If an exception is raised, the running texts
        are queued again.
        """
        start, wait_s = time.perf_counter(), 0.0
        batch, started, done = self._waiting.take(), None, self._in_flight
        vectors = np.empty((0, self.embedding_dim), np.float32)
        try:
            if batch is not None:
                started = self._dispatch(batch)
            if not self.config.overlap:
                done, started = started, None
            if done is not None:
                before = time.perf_counter()
                vectors = np.asarray(done.output)
                wait_s = time.perf_counter() - before
        except BaseException:
            running = [] if self._in_flight is None else self._in_flight.batch.requests
            self._waiting.put_back([*running, *(() if batch is None else batch.requests)])
            self._in_flight = None
            raise
        self._in_flight = started
        updates = [] if done is None else list(self._end(done.batch, vectors))
        num_rows, num_tokens = (0, 0) if batch is None else (len(batch.requests), batch.num_tokens)
        self.num_steps += 1
        self.num_computed += num_tokens
        self.last_step = StepStats(num_rows, num_tokens, time.perf_counter() - start, wait_s)
        return updates

    def embed(
        self,
        texts: Sequence[Sequence[int]],
        *,
        on_progress: Callable[[int], Any] = lambda num_texts: None,
    ) -> np.ndarray:
        """Return the pooled vectors of texts given as token ids, float32 [texts, dim], in order.

        If any text is invalid, none is embedded: `InvalidRequestError` names the index of the
        first invalid one.
        """
        requests: dict[str, int] = {}
        vectors = np.empty((len(texts), self.embedding_dim), np.float32)
        try:
            for index, token_ids in enumerate(texts):
                try:
                    [request] = self.add(token_ids)
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"text {index}: {error}", error.field) from error
                requests[request.id] = index
            num_left = len(requests)
            while num_left:
                assert self.has_requests, "another thread calls step on this embedder"
                for update in self.step():
                    if update.request.id in requests:
                        vectors[requests[update.request.id]] = update.embedding
                        num_left -= 1
                        on_progress(1)
        finally:
            for request_id in requests:
                self.abort(request_id)
        return vectors

    def _dispatch(self, batch: TextBatch) -> _InFlight:
        program = self._program(batch.bucket)
        token_ids = np.zeros(batch.bucket, np.int32)
        lengths = np.zeros(batch.bucket.rows, np.int32)
        for row, request in enumerate(batch.requests):
            lengths[row] = request.prompt_len
            token_ids[row, : request.prompt_len] = request.prompt_token_ids
            request.started_at = request.started_at or time.monotonic()
        return _InFlight(batch, program(self.weights, token_ids, lengths))

    def _end(self, batch: TextBatch, vectors: np.ndarray) -> Iterator[Update]:
        for request, vector in zip(batch.requests, vectors, strict=False):  # padding comes last
            if self._requests.pop(request.id, None) is not None:
                request.finish_reason = FinishReason.STOP
                yield Update(request, [], "", FinishReason.STOP, vector)

    def _program(self, bucket: TextBucket) -> Any:
        """Return the compiled program; compile it now, with a warning, if warm-up missed it."""
        if bucket not in self._programs:
            if self._is_warm:
                self.num_late_compiles += 1
                logging.warning("compiling %s after warm-up: requests wait for it", bucket)
            started = time.perf_counter()
            self._programs[bucket] = compile_program(self._lower(bucket))
            embed.clear_cache()  # type: ignore[attr-defined]  # a method of jitted functions
            self.compile_seconds += time.perf_counter() - started
        return self._programs[bucket]

    def _lower(self, bucket: TextBucket) -> Any:
        token_ids = jax.ShapeDtypeStruct(tuple(bucket), jnp.int32)
        lengths = jax.ShapeDtypeStruct((bucket.rows,), jnp.int32)
        modes = self.options.pooling
        return embed.lower(self.weights, token_ids, lengths, model=self.model, modes=modes)
