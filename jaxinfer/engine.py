"""The engine: requests in, tokens and text out, one step at a time.

    plan    = scheduler.schedule()          # integers: rows, tokens, pages
    output  = runner.dispatch(plan)         # the device starts; returns at once
    updates = commit(the previous step)     # read its tokens while this one runs

With `overlap` off the step just dispatched is committed instead. A request that ends by a token is
noticed one step late under overlap; the surplus token is dropped. Not thread-safe: one thread owns
an engine (the serving loop, or the caller of `LLM`).
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from jaxinfer.config import EngineConfig
from jaxinfer.detokenizer import TextStream
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.numerics import check_numerics
from jaxinfer.pages import PagePool, root_key
from jaxinfer.policies import POLICIES
from jaxinfer.reports import Reports
from jaxinfer.request import FinishReason, Request
from jaxinfer.runner import Runner
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_slots import pack_extras, pack_scalars
from jaxinfer.scheduler import Plan, Scheduler
from jaxinfer.step import Admission, StepOutput
from jaxinfer.tokenizer import Tokenizer


class InvalidRequestError(ValueError):
    """A request refused at admission; names the value, the limit and the way out."""


class Update(NamedTuple):
    """What one step brought to a request."""

    request: Request
    token_ids: list[int]  # new ones
    text: str  # new text: whole characters, never part of a stop string
    finish_reason: FinishReason | None


@dataclasses.dataclass
class StepStats:
    """Of the last step: sizes, and seconds by the host's clock."""

    num_rows: int = 0
    num_tokens: int = 0
    total_s: float = 0.0
    wait_s: float = 0.0  # blocked on the device


class _InFlight(NamedTuple):
    plan: Plan
    output: StepOutput


class Engine:
    """Continuous batching over one model.

    `tokenizer` None: requests are token ids, updates carry no text, and stop strings and bad words
    are refused. `eos_token_ids` end a request unless it ignores them.
    """

    def __init__(
        self,
        model: FunctionalModel,
        weights: Weights,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        name: str = "",
    ):
        self.config = config = config or EngineConfig()
        check_numerics(config, model.numerics)
        self.model = model
        self.name = name
        self.tokenizer = tokenizer
        # Some checkpoints name ids past the embedding: those are never sampled.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < model.config.vocab_size)
        self.max_len = config.max_len or model.config.max_len
        if self.max_len > model.config.max_len:
            text = "max_len is %d, past the %d positions that the model was made for"
            logging.warning(text, self.max_len, model.config.max_len)
        self.runner = Runner(model, weights, config, self.max_len)
        self.pool = PagePool(
            self.runner.memory.num_pages,
            config.cache.page_size,
            prefix_cache=config.cache.prefix_cache,
        )
        self.scheduler = Scheduler(
            self.pool,
            POLICIES[config.scheduler.policy](config.scheduler.max_rows),
            max_tokens=config.scheduler.max_tokens,
            max_rows=config.scheduler.max_rows,
        )
        self.stats = StepStats()
        self.num_generated = 0  # tokens handed out since the start
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, TextStream] = {}
        self._unreported: list[Update] = []  # ended outside a step
        self._in_flight: _InFlight | None = None
        self._num_added = 0
        self._seeds = random.Random(config.seed)

    @property
    def has_requests(self) -> bool:
        """Whether a further `step` will bring something."""
        return bool(self._requests or self._unreported or self._in_flight)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def warm_up(self, on_progress: Callable[[str], None] = lambda program: None) -> None:
        """Compile every program that serving needs."""
        self.runner.warm_up(on_progress)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Request]:
        """Queue a prompt; one request for each of `params.n` samples.

        Output ends at `max_tokens` or where the context of `max_len` tokens is full. Requests with
        different `cache_salt` share no cached pages. Raises `InvalidRequestError`, and then nothing
        has changed.
        """
        params = params or SamplingParams()
        base_id = request_id if request_id is not None else self._new_id()
        names = [base_id if i == 0 else f"{base_id}#{i}" for i in range(params.n)]
        if taken := [name for name in names if name in self._requests]:
            raise InvalidRequestError(f"request id {taken[0]!r} is in use; choose another")
        if not isinstance(priority, int):
            raise InvalidRequestError(f"priority is {priority!r}; it must be a whole number")
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidRequestError(
                f"priority is {priority}, which the policy {self.config.scheduler.policy} does not "
                "know; set scheduler.policy=priority"
            )
        max_len, bad_word_ids = self._check(prompt_token_ids, params)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(32)
        requests = []
        for i, name in enumerate(names):
            request = Request(
                name,
                prompt_token_ids,
                params,
                max_len=max_len,
                seed=(seed + i * 0x9E3779B9) % 2**32,
                arrival=self._num_added,
                priority=priority,
                cache_root=self._cache_root(params, max_len, cache_salt),
                bad_word_ids=bad_word_ids,
            )
            self._num_added += 1
            requests.append(request)
            self._start(request)
        return requests

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the `InvalidRequestError` that `add` would; nothing is queued."""
        self._check(prompt_token_ids, params)

    def abort(self, request_id: str) -> bool:
        """End a request now; its pages are free at once. False if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.scheduler.finish(request, FinishReason.ABORT)
        self._unreported.append(self._end(request, [], ""))
        return True

    def clear_prefix_cache(self) -> None:
        """Forget which prefixes the pages hold; running requests go on, and share nothing more."""
        self.pool.forget_all()
        for request in self._requests.values():
            request.cache_root = None

    def step(self) -> list[Update]:
        """Plan and start one step, read one; what came of it, one update a request.

        An exception on the way (Ctrl-C, the device) leaves a sound engine: what was running is
        computed again from the tokens read so far, and yields the same ones.
        """
        start = time.perf_counter()
        self.stats.wait_s = 0.0
        try:
            plan = self.scheduler.schedule()
            started = self._dispatch(plan) if plan.rows else None
            if self._in_flight is not None:
                self._commit(self._in_flight)
            if started is not None and not self.config.overlap:
                self._commit(started)
                started = None
            self._in_flight = started
        except BaseException:
            self._recover()
            raise
        if self.config.check_every_step:
            self.scheduler.check()
        self.stats.num_rows, self.stats.num_tokens = len(plan.rows), plan.num_tokens
        self.stats.total_s = time.perf_counter() - start
        updates, self._unreported = self._unreported, []
        return updates

    def _recover(self) -> None:
        """Start over with a fresh cache and the requests that have not ended."""
        self._in_flight = None
        self.runner.reset_state()
        self.pool.reset()
        for request in [r for r in self._requests.values() if r.is_finished]:
            self._unreported.append(self._end(request, [], ""))
        self.scheduler.reset(list(self._requests.values()))

    def _new_id(self) -> str:
        number = self._num_added
        while f"request-{number}" in self._requests:
            number += 1
        return f"request-{number}"

    def _start(self, request: Request) -> None:
        self._requests[request.id] = request
        if self.tokenizer is not None:
            self._streams[request.id] = TextStream(
                self.tokenizer,
                stop=request.params.stop,
                include_stop_str_in_output=request.params.include_stop_str_in_output,
                skip_special_tokens=request.params.skip_special_tokens,
            )
        if request.num_remaining > 0:
            self.scheduler.add(request)
        else:  # max_tokens 0 and nothing to compute
            request.finish_reason = FinishReason.LENGTH
            self._unreported.append(self._end(request, [], ""))

    def _dispatch(self, plan: Plan) -> _InFlight:
        for request in plan.admitted:
            assert request.slot is not None
            about = {"eos_token_ids": self.eos_token_ids, "bad_word_ids": request.bad_word_ids}
            ints, floats = pack_scalars(
                request.params, seed=request.seed, prompt_len=request.prompt_len, **about
            )
            extras = pack_extras(
                request.params,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids,
                vocab_size=self.model.config.vocab_size,
                **about,
            )
            self.runner.admit(Admission(request.slot, request.pages, ints, floats), extras)
        return _InFlight(plan, self.runner.dispatch(plan))

    def _commit(self, step: _InFlight) -> None:
        """Read a step's tokens and hand them to their requests; updates go to `_unreported`."""
        start = time.perf_counter()
        tokens = np.asarray(step.output.sampled.tokens).tolist()
        self.stats.wait_s += time.perf_counter() - start
        reports = Reports(step.output)
        updates = self._unreported
        at = 0  # the row's first token in the step
        for i, row in enumerate(step.plan.rows):
            request = row.request
            request.num_pending -= row.is_sampled
            if not request.is_finished:
                if request.params.prompt_logprobs is not None:
                    reports.add_prompt_logprobs(row, at)
                # A decode fills a page every `page_size` tokens only.
                is_decode = row.is_sampled and row.num_tokens == 1
                if not is_decode or request.num_read % self.pool.page_size <= 1:
                    self.scheduler.register_pages(request)
                if row.is_sampled:
                    updates.append(self._accept(request, tokens[i], reports, i))
                elif row.end >= request.max_len - 1:  # max_tokens 0: nothing to sample
                    self.scheduler.finish(request, FinishReason.LENGTH)
                    updates.append(self._end(request, [], ""))
            at += row.num_tokens

    def _accept(self, request: Request, token_id: int, reports: Reports, row: int) -> Update:
        """One new token of a request; ends it where it says so."""
        params = request.params
        request.output_token_ids.append(token_id)
        self.num_generated += 1
        if params.logprobs is not None:
            reports.add_logprobs(request, row)
        num_output = len(request.output_token_ids)
        stream = self._streams.get(request.id)
        text, is_stopped = "", False
        if stream is not None:
            delta = stream.push(token_id, is_watched=num_output >= params.min_tokens)
            text, is_stopped = delta.text, delta.stop is not None
        is_eos = token_id in self.eos_token_ids and not params.ignore_eos
        is_stop_token = is_eos or token_id in params.stop_token_ids
        if is_stop_token and num_output >= params.min_tokens:
            request.stop_token_id = token_id
            is_stopped = True
        if is_stopped:
            self.scheduler.finish(request, FinishReason.STOP)
        elif request.num_read >= request.max_len:
            self.scheduler.finish(request, FinishReason.LENGTH)
        else:
            return Update(request, [token_id], text, None)
        return self._end(request, [token_id], text)

    def _end(self, request: Request, token_ids: list[int], text: str) -> Update:
        """Forget a finished request; its update brings the text held back so far."""
        del self._requests[request.id]
        stream = self._streams.pop(request.id, None)
        if stream is not None and not stream.has_stopped:
            text += stream.finish().text
        return Update(request, token_ids, text, request.finish_reason)

    def _cache_root(self, params: SamplingParams, max_len: int, salt: str) -> bytes | None:
        """None where pages may not be shared: a prompt whose log-probabilities are wanted has to be
        computed whole, and a RoPE scaling past its length limit depends on the prompt's length."""
        limit = self.model.config.rope.scaling.length_limit
        if params.prompt_logprobs is not None or (limit is not None and max_len > limit):
            return None
        return root_key(salt, self.name, str(self.runner.cache_dtype))

    def _check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """The request's `max_len` and its bad words as token ids, or `InvalidRequestError`."""
        if isinstance(prompt_token_ids, str | bytes):
            raise InvalidRequestError("the prompt must be token ids; LLM takes text")
        vocab_size, prompt_len = self.model.config.vocab_size, len(prompt_token_ids)
        if not prompt_len:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        for position, token_id in enumerate(prompt_token_ids):
            is_int = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"prompt token {token_id!r} at position {position} is outside the vocabulary "
                    f"[0, {vocab_size})"
                )
        room = self.max_len - prompt_len
        if room < (0 if params.max_tokens == 0 else 1):
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens; the context holds {self.max_len} and the "
                "output needs at least one: shorten the prompt or raise max_len"
            )
        max_len = prompt_len + min(room, room if params.max_tokens is None else params.max_tokens)
        max_len = self._fit_pool(prompt_len, max_len, params)
        bad_word_ids = self._bad_word_ids(params)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and this engine has none; use stop_token_ids"
            )
        try:
            params.check(vocab_size, bad_word_ids)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        return max_len, bad_word_ids

    def _fit_pool(self, prompt_len: int, max_len: int, params: SamplingParams) -> int:
        """`max_len`, cut to the pool where `max_tokens` leaves it open, else refused over it."""
        capacity = self.pool.num_pages * self.pool.page_size + 1  # the last token is never cached
        if max_len <= capacity:
            return max_len
        if params.max_tokens is None and prompt_len < capacity:
            return capacity
        raise InvalidRequestError(
            f"the request may grow to {max_len} tokens ({prompt_len} of the prompt); the cache "
            f"holds {capacity} ({self.pool.num_pages} pages of {self.pool.page_size}): lower "
            "max_tokens, shorten the prompt or raise cache.num_pages"
        )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word's token ids, as it stands at the start of a text and after a space."""
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise InvalidRequestError("bad_words need a tokenizer, and this engine has none")
        sequences = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if not ids:
                    raise InvalidRequestError(f"bad_words: {word!r} has no tokens; leave it out")
                sequences[ids] = None
        return tuple(sequences)
