"""The engine: requests in, tokens and text out, one step at a time.

    plan    = scheduler.schedule()          # integers: rows, tokens, pages
    output  = runner.dispatch(plan)         # the device starts; returns at once
    updates = commit(the previous step)     # read its tokens while this one runs

With `overlap` off the step just dispatched is committed instead. A request that ends by a token is
noticed one step late under overlap; the surplus token is dropped. Not thread-safe: one thread owns
an engine (the serving loop, or the caller of `LLM`).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.admission import Admissible, Limits, check_ids, check_priority, context_len
from jaxinfer.engine.outputs import Reports
from jaxinfer.engine.pages import PagePool, root_key
from jaxinfer.engine.policies import POLICIES
from jaxinfer.engine.request import FinishReason, Request, new_id, sample_ids
from jaxinfer.engine.scheduler import Plan, Scheduler
from jaxinfer.engine.stats import EngineStats, StepStats
from jaxinfer.execution.numerics import check_numerics, check_weights
from jaxinfer.execution.programs import Admission
from jaxinfer.execution.runner import Runner
from jaxinfer.execution.step import StepOutput
from jaxinfer.loading.splitting import place_weights
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.parallel.forward import forward_for
from jaxinfer.parallel.hosts import HostsError
from jaxinfer.parallel.sharded_model import ShardedModel, sharded_for
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.slots import pack
from jaxinfer.text.detokenizer import TextStream
from jaxinfer.text.tokenizer import Tokenizer


class Update(NamedTuple):
    """What one step brought to a request."""

    request: Request
    token_ids: list[int]  # new ones
    text: str  # new text: whole characters, never part of a stop string
    finish_reason: FinishReason | None
    embedding: np.ndarray | None = None  # of an `Embedder`: float32 [D]


class _InFlight(NamedTuple):
    plan: Plan | None  # that the step finishes
    output: StepOutput


class _Begun(NamedTuple):
    plan: Plan
    started: _InFlight | None
    begin_s: float  # that it took the host


class Engine:
    """Continuous batching over one model.

    `tokenizer` None: requests are token ids, updates carry no text, and stop strings and bad words
    are refused. `eos_token_ids` end a request unless it ignores them.

    `config.mesh` says over which of `jax.devices()`; the weights of a `ShardedModel` lie on its own
    mesh already.
    """

    def __init__(
        self,
        model: FunctionalModel | ShardedModel,
        weights: Weights,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        name: str = "",
    ):
        self.config = config = config or EngineConfig()
        if isinstance(model, FunctionalModel):
            sharded = sharded_for(model, config)
            weights = place_weights(sharded, weights)
        else:
            sharded, model = model, model.model
        check_numerics(config, model.numerics)
        check_weights(config, weights)
        self.model = model
        self.name = name
        self.tokenizer = tokenizer
        # Some checkpoints name ids past the embedding: those are never sampled.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < model.config.vocab_size)
        self.max_model_len = context_len(config.max_model_len, model)
        forward = forward_for(sharded, config.cache.page_size)
        self.runner = Runner(forward, weights, config, self.max_model_len)
        self.pool = PagePool(
            self.runner.memory.num_pages,
            config.cache.page_size,
            prefix_cache=config.cache.prefix_cache,
        )
        self.scheduler = Scheduler(
            self.pool,
            POLICIES[config.scheduler.policy](config.scheduler.max_num_seqs),
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            restart_len=model.config.length_limit if model.family.restarts_at_limit else None,
            num_stages=sharded.num_stages,
        )
        pages = self.pool.num_pages, self.pool.page_size
        self.limits = Limits(model.config.vocab_size, self.max_model_len, *pages, tokenizer)
        self.last_step = StepStats()
        self.num_generated = 0  # tokens handed out since the start
        self.num_computed = 0  # tokens that steps have run through the model
        self.num_steps = 0
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, TextStream] = {}
        self._unreported: list[Update] = []  # ended outside a step
        self._in_flight: _InFlight | None = None
        self._begun: _Begun | None = None
        self._num_added = 0
        self._seeds = random.Random(config.seed)

    @property
    def has_requests(self) -> bool:
        """Whether a further `step` will bring something."""
        return bool(self._requests or self._unreported or self._in_flight or self._begun)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_awaited(self) -> int:
        """Tokens in the step that `end_step` would wait for; 0: it would not wait."""
        step = self._in_flight
        if self._begun is not None and not self.config.overlap:
            step = self._begun.started
        if step is None or step.plan is None:
            return 0
        tokens: Any = step.output.sampled.tokens
        return 0 if tokens.is_ready() else step.plan.num_tokens

    @property
    def stats(self) -> EngineStats:
        """A snapshot: immutable, so another thread may read it."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_pages=self.pool.num_pages,
            num_owned_pages=self.pool.num_owned,
            num_cached_pages=self.pool.num_cached,
            num_steps=self.num_steps,
            num_computed=self.num_computed,
            num_generated=self.num_generated,
            num_shared=self.scheduler.num_shared_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_compiled=self.runner.num_compiled,
            num_late_compiles=self.runner.num_late_compiles,
            last_step=self.last_step,
        )

    @property
    def weights(self) -> Weights:
        """As they lie on the device."""
        return self.runner.weights

    @property
    def num_programs(self) -> int:
        """That `warm_up` compiles: one a bucket, and two for admission."""
        return len(self.config.buckets) + 2

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

        Output ends at `max_tokens` or where the context of `max_model_len` tokens is full. Requests
        with different `cache_salt` share no cached pages. Raises `InvalidRequestError`, and
        then nothing has changed.
        """
        params = params or SamplingParams()
        base_id = request_id if request_id is not None else new_id(self._num_added, self._requests)
        names = sample_ids(base_id, params.n)
        check_ids(names, self._requests)
        max_len, bad_word_ids = self.check(prompt_token_ids, params, priority=priority)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(32)
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
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
                cache_root=self.cache_root(params, max_len, cache_salt),
                bad_word_ids=bad_word_ids,
                stop_token_ids=stop_token_ids,
            )
            self._num_added += 1
            requests.append(request)
            self._start(request)
        return requests

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> Admissible:
        """Raise the `InvalidRequestError` that `add` would, but for a request id in use.

        Nothing is queued; any thread may call this.
        """
        check_priority(priority, self.config.scheduler.policy)
        return self.limits.check(prompt_token_ids, params)

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
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """The first half of `step`: plan and start one; none where one is begun and not ended."""
        if self._begun is not None:
            return
        start = time.perf_counter()
        with self._recovering():
            plan = self.scheduler.schedule()
            started = self._dispatch(plan) if plan.rows or self.runner.is_under_way else None
            self._begun = _Begun(plan, started, time.perf_counter() - start)

    def end_step(self) -> list[Update]:
        """The second half: read the step before the one begun, or with `overlap` off that one."""
        assert self._begun is not None, "no step is begun"
        start = time.perf_counter()
        self._wait_s = 0.0
        with self._recovering():
            (plan, started, begin_s), self._begun = self._begun, None
            if self._in_flight is not None:
                self._commit(self._in_flight)
            if started is not None and not self.config.overlap:
                self._commit(started)
                started = None
            self._in_flight = started
        if self.config.check_every_step:
            self.scheduler.check()
        num_tokens = plan.num_tokens
        self.num_steps += 1
        self.num_computed += num_tokens
        total_s = begin_s + time.perf_counter() - start
        self.last_step = StepStats(len(plan.rows), num_tokens, total_s, self._wait_s)
        updates, self._unreported = self._unreported, []
        return updates

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        try:
            yield
        except HostsError:  # no process is left to recover with
            raise
        except BaseException:
            try:
                self._recover()
            except HostsError as lost:  # which is what the other error was of
                raise lost from None
            raise

    def _recover(self) -> None:
        """Start over with a fresh cache and the requests that have not ended. The device's part is
        last: another Ctrl-C may come out of it, and must find the host's part done."""
        self._in_flight = self._begun = None
        self.pool.reset()
        for request in [r for r in self._requests.values() if r.is_finished]:
            self._unreported.append(self._end(request, [], ""))
        self.scheduler.reset(list(self._requests.values()))
        self.runner.peers.raise_if_lost()
        self.runner.reset_state()

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
            if request.started_at is None:
                request.started_at = time.monotonic()
            vocab_size = self.model.config.vocab_size
            ints, floats, extras = pack(request, self.eos_token_ids, vocab_size)
            self.runner.admit(Admission(request.slot, request.pages, ints, floats), extras)
        return _InFlight(*self.runner.dispatch(plan))

    def _commit(self, step: _InFlight) -> None:
        """Read a step's tokens and hand them to their requests; updates go to `_unreported`."""
        if step.plan is None:
            return
        start = time.perf_counter()
        tokens = np.asarray(step.output.sampled.tokens).tolist()
        self._wait_s += time.perf_counter() - start
        reports = Reports(step.output)
        updates = self._unreported
        page_size = self.pool.page_size
        at = 0  # the row's first token in the step
        for i, row in enumerate(step.plan.rows):
            request, _, start, num_tokens, is_sampled = row
            if request.finish_reason is None:
                if request.params.prompt_logprobs is not None:
                    reports.add_prompt_logprobs(row, at)
                # A decode fills a page every `page_size` tokens only.
                if num_tokens > 1 or (start + 1) % page_size <= 1 or not is_sampled:
                    self.scheduler.register_pages(request)
                if is_sampled:
                    updates.append(self._accept(request, tokens[i], reports, i))
                elif row.end >= request.max_len - 1:  # max_tokens 0: nothing to sample
                    self.scheduler.finish(request, FinishReason.LENGTH)
                    updates.append(self._end(request, [], ""))
            at += num_tokens

    def _accept(self, request: Request, token_id: int, reports: Reports, row: int) -> Update:
        """One new token of a request; ends it where it says so."""
        params = request.params
        request.read(token_id)
        self.num_generated += 1
        if params.logprobs is not None:
            reports.add_logprobs(request, row)
        may_stop = len(request.output_token_ids) >= params.min_tokens
        stream = self._streams.get(request.id)
        text, stop = "", None
        if stream is not None:
            text, stop = stream.push(token_id, is_watched=may_stop)
        if stop is not None or (may_stop and token_id in request.stop_token_ids):
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

    def cache_root(self, params: SamplingParams, max_len: int, salt: str) -> bytes | None:
        """Where prefix-cache keys begin; None where pages may not be shared: a prompt whose
        log-probabilities are wanted has to be computed whole, and a RoPE scaling past its length
        limit depends on the prompt's length."""
        limit = self.model.config.length_limit
        if params.prompt_logprobs is not None or (limit is not None and max_len > limit):
            return None
        return root_key(salt, self.name, str(self.runner.cache_dtype))
