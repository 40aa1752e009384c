"""The engine: requests in, tokens and text out, one step at a time.

    plan    = scheduler.schedule()          # integers: rows, tokens, pages
    output  = runner.dispatch(plan)         # the device starts; returns at once
    updates = process(the previous step)    # read its tokens while this one runs

Without `overlap` the step just dispatched is processed instead. A request that ends by a token is
noticed one step late under overlap; the surplus token is dropped. Not thread-safe: one thread owns
an engine (the serving loop, or the caller of `LLM`).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.admission import (
    Admissible,
    Limits,
    check_ids,
    check_priority,
    resolve_max_model_len,
)
from jaxinfer.engine.outputs import OutputProcessor, Update
from jaxinfer.engine.pages import PagePool, root_key
from jaxinfer.engine.policies import POLICIES
from jaxinfer.engine.recovery import recovering
from jaxinfer.engine.request import (
    FinishReason,
    Rank,
    Request,
    SamplingInputs,
    new_id,
    sample_ids,
)
from jaxinfer.engine.scheduler import Plan, Scheduler
from jaxinfer.engine.stats import EngineStats, StepCounters, StepStats
from jaxinfer.execution.numerics import check_numerics, check_weights
from jaxinfer.execution.programs import Admission
from jaxinfer.execution.runner import Runner
from jaxinfer.execution.step import StepOutput
from jaxinfer.loading.splitting import place_weights
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.parallel.forward import forward_for
from jaxinfer.parallel.sharded_model import ShardedModel, sharded_for
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.slots import pack
from jaxinfer.text.tokenizer import Tokenizer

SEED_STRIDE = 0x9E3779B9  # between the samples of a prompt: 2**32 over the golden ratio


class _Dispatched(NamedTuple):
    """A step that the device has received and the host has not processed."""

    plan: Plan
    finished: Plan | None = None  # whose tokens it samples: in a pipeline, an earlier plan
    output: StepOutput | None = None  # None: the plan had no rows, and nothing was dispatched
    host_s: float = 0.0  # to plan and dispatch it


class Engine:
    """Continuous batching over one model.

    Without a tokenizer, requests are token ids, updates have no text, and stop strings and bad
    words are refused. `eos_token_ids` end a request unless it ignores them.

    The engine runs on the `jax.devices()` that `config.mesh` names; the weights of a `ShardedModel`
    are on its own mesh already.
    """

    can_generate = True
    embedding_dim = 0

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
        self.max_model_len = resolve_max_model_len(config.max_model_len, model)
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
        self.counters = StepCounters()
        self._outputs = OutputProcessor(self.scheduler, tokenizer, self.counters)
        self._lag = 1 if config.overlap else 0  # steps that stay on the device between two calls
        self._steps = self._no_steps()
        self._num_added = 0
        self._seeds = random.Random(config.seed)

    @property
    def replicas(self) -> tuple[Engine, ...]:
        """The engines that this one is made of: itself."""
        return (self,)

    @property
    def has_requests(self) -> bool:
        """Whether a further `step` will bring something."""
        on_device = self._is_begun or any(step.output is not None for step in self._steps)
        return bool(self._outputs.requests or self._outputs.updates or on_device)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._outputs.requests)

    @property
    def num_awaited(self) -> int:
        """Tokens of the step that `end_step` would wait for; 0 if it would not wait."""
        step = self._steps[0] if self._steps else None
        if step is None or step.finished is None or step.output is None:
            return 0
        tokens: Any = step.output.sampled.tokens
        return 0 if tokens.is_ready() else step.finished.num_tokens

    @property
    def stats(self) -> EngineStats:
        """A snapshot: immutable, so another thread may read it."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_pages=self.pool.num_pages,
            num_owned_pages=self.pool.num_owned,
            num_cached_pages=self.pool.num_cached,
            num_steps=self.counters.num_steps,
            num_computed=self.counters.num_computed,
            num_generated=self.counters.num_generated,
            num_shared=self.scheduler.num_shared_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_compiled=self.runner.num_compiled,
            num_late_compiles=self.runner.num_late_compiles,
            last_step=self.counters.last_step,
        )

    @property
    def weights(self) -> Weights:
        """The weights, on the devices."""
        return self.runner.weights

    @property
    def num_programs(self) -> int:
        """The number of programs that `warm_up` compiles."""
        return self.runner.num_programs

    def warm_up(self, on_progress: Callable[[str], None] = lambda program: None) -> None:
        """Compile every program that serving needs; `on_progress` gets the name of each one."""
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
        """Queue a prompt; returns one request for each of `params.n` samples.

        Output ends at `max_tokens` or where the context of `max_model_len` tokens is full. Requests
        with different `cache_salt` share no cached pages. Raises `InvalidRequestError`, and then
        nothing has changed.
        """
        params = params or SamplingParams()
        known = self._outputs.requests
        base_id = request_id if request_id is not None else new_id(self._num_added, known)
        names = sample_ids(base_id, params.n)
        check_ids(names, known)
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
                sampling=SamplingInputs(
                    (seed + i * SEED_STRIDE) % 2**32, bad_word_ids, stop_token_ids
                ),
                rank=Rank(priority, self._num_added),
                cache_root=self.cache_root(params, max_len, cache_salt),
            )
            self._num_added += 1
            requests.append(request)
            self._start(request)
        return requests

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> Admissible:
        """Raise the `InvalidRequestError` that `add` would, except for a request id in use.

        Nothing is queued; any thread may call this.
        """
        check_priority(priority, self.config.scheduler.policy)
        return self.limits.check(prompt_token_ids, params)

    def abort(self, request_id: str) -> bool:
        """End a request now; its pages are free at once. Returns False if it is unknown or has
        ended."""
        request = self._outputs.requests.get(request_id)
        if request is None:
            return False
        self.scheduler.finish(request, FinishReason.ABORT)
        self._outputs.end(request)
        return True

    def cache_root(self, params: SamplingParams, max_len: int, salt: str) -> bytes | None:
        """Return where the keys of the prefix cache begin, or None if pages may not be shared.

        A prompt whose log-probabilities are wanted has to be computed whole, and a RoPE scaling
        past its length limit depends on the prompt's length.
        """
        limit = self.model.config.length_limit
        if params.prompt_logprobs is not None or (limit is not None and max_len > limit):
            return None
        return root_key(salt, self.name, str(self.runner.cache_dtype))

    def clear_prefix_cache(self) -> None:
        """Forget which prefixes the pages hold. Running requests go on, and share no more pages."""
        self.pool.forget_all()
        for request in self._outputs.requests.values():
            request.prefix.root = None

    def step(self) -> list[Update]:
        """Plan and start one step, process one; return its updates, one for each request.

        An exception on the way (Ctrl-C, the device) leaves a sound engine: what was running is
        computed again from the tokens read so far, and yields the same ones.
        """
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """The first half of `step`: plan and dispatch. Does nothing if a step has begun and not
        ended."""
        if self._is_begun:
            return
        start = time.perf_counter()
        with recovering(self._recover):
            plan = self.scheduler.schedule()
            step = _Dispatched(plan)
            if plan.rows or self.runner.is_under_way:
                step = self._dispatch(plan)
            self._steps.append(step._replace(host_s=time.perf_counter() - start))

    def end_step(self) -> list[Update]:
        """The second half of `step`: process the step before the one begun, or without `overlap`
        that one."""
        assert self._is_begun, "no step has begun"
        start = time.perf_counter()
        begun = self._steps[-1]
        with recovering(self._recover):
            wait_s = self._process(self._steps.popleft())
        if self.config.check_every_step:
            self.scheduler.check()
        total_s = begun.host_s + time.perf_counter() - start
        plan = begun.plan
        self.counters.record(StepStats(len(plan.rows), plan.num_tokens, total_s, wait_s))
        return self._outputs.take_updates()

    @property
    def _is_begun(self) -> bool:
        return len(self._steps) > self._lag

    def _no_steps(self) -> deque[_Dispatched]:
        return deque([_Dispatched(Plan([], [], [], []))] * self._lag)

    def _start(self, request: Request) -> None:
        self._outputs.add(request)
        if request.extend_len > 0:
            self.scheduler.add(request)
        else:  # max_tokens 0 and nothing to compute
            request.finish_reason = FinishReason.LENGTH
            self._outputs.end(request)

    def _dispatch(self, plan: Plan) -> _Dispatched:
        """Write the admitted requests into their slots, and start the step on the device."""
        for request in plan.admitted:
            assert request.slot is not None
            if request.started_at is None:
                request.started_at = time.monotonic()
            vocab_size = self.model.config.vocab_size
            ints, floats, extras = pack(request, self.eos_token_ids, vocab_size)
            self.runner.admit(Admission(request.slot, request.pages, ints, floats), extras)
        return _Dispatched(plan, *self.runner.dispatch(plan))

    def _process(self, step: _Dispatched) -> float:
        """Wait for a step's tokens and hand them to their requests; returns the seconds waited."""
        if step.finished is None or step.output is None:
            return 0.0
        start = time.perf_counter()
        tokens = np.asarray(step.output.sampled.tokens).tolist()
        wait_s = time.perf_counter() - start
        self._outputs.process(step.finished, step.output, tokens)
        return wait_s

    def _recover(self) -> None:
        """Start over with a fresh cache and the requests that have not ended. The device's part
        comes last: another Ctrl-C may interrupt it, and must find the host's part done."""
        self._steps = self._no_steps()
        self.pool.reset()
        for request in [r for r in self._outputs.requests.values() if r.is_finished]:
            self._outputs.end(request)
        self.scheduler.reset(list(self._outputs.requests.values()))
        self.runner.peers.raise_if_lost()
        self.runner.reset_state()
