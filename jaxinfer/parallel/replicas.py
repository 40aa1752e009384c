"""Replicas: several engines over one model, each on devices of its own, as one engine.

    add      the engine with the fewest tokens ahead of the request takes it (`routing.py`)
    step     begin a step on every engine, then end those that the devices have finished

Engines share nothing: each has its scheduler, its pages and its prefix cache. A request stays on
its replica, and yields the tokens that one engine would: seeds are drawn here, in the order of
`add`, as one engine draws them. Priorities order the requests of one replica.

An engine begins step N + 1 before it ends (reads) step N, so its devices have work while the host
serves other engines: with h seconds of the host and d of the device for a step, n engines take
max(d, n * h) for a step each. If no step is finished, the one with the fewest tokens is waited for:
it is the shortest, so the other devices do not become idle meanwhile. A long chunk of a prompt on
one replica delays no decode on another; if all were stepped in rounds, each step would take as long
as the longest. Without `overlap` a step takes max(d + h, n * h).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.engine.admission import Admissible, check_ids
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Update
from jaxinfer.engine.protocol import EngineLike
from jaxinfer.engine.request import FinishReason, Request, new_id, sample_ids
from jaxinfer.engine.stats import EngineStats, StepStats
from jaxinfer.loading.placement import tree_shardings
from jaxinfer.models.functional import Weights
from jaxinfer.parallel.routing import Router
from jaxinfer.parallel.sharded_model import ShardedModel
from jaxinfer.sampling.params import SamplingParams


class Replicas:
    """Several engines of the same model and config, behind the methods of one `Engine`.

    A request may be as large as the smallest of their pools allows, on whichever replica it runs.
    One thread owns it, as an engine.
    """

    can_generate = True
    embedding_dim = 0

    def __init__(self, engines: Sequence[Engine]):
        self.replicas = tuple(engines)
        first = self.replicas[0]
        self.config = first.config
        self.model = first.model
        self.name = first.name
        self.tokenizer = first.tokenizer
        self.eos_token_ids = first.eos_token_ids
        self.max_model_len = first.max_model_len
        smallest = min(engine.limits.num_pages for engine in self.replicas)
        self.limits = first.limits._replace(num_pages=smallest)
        for engine in self.replicas:
            engine.limits = self.limits
        self._last_step = StepStats()
        self._router = Router(len(self.replicas))
        self._done: list[int] | None = None  # done by running requests; None: not counted
        self._requests: dict[str, Request] = {}  # whose end has not been reported
        self._unreported: list[Update] = []  # from a round in which a replica failed
        self._num_added = 0
        self._seeds = random.Random(self.config.seed)

    @property
    def has_requests(self) -> bool:
        """Whether a further `step` will bring something."""
        return bool(self._unreported) or any(engine.has_requests for engine in self.replicas)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return sum(engine.num_requests for engine in self.replicas)

    @property
    def stats(self) -> EngineStats:
        """The sums over all replicas: an immutable snapshot, as an engine's.

        The last step is the last round: rows and tokens of all replicas, seconds by the clock.
        """
        all_stats = [engine.stats for engine in self.replicas]
        names = [name for name in EngineStats._fields if name != "last_step"]
        sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
        return EngineStats(**sums, last_step=self._last_step)

    @property
    def loads(self) -> list[int]:
        """Tokens that each replica has yet to run, as `routing.py` counts them."""
        return self._router.loads(self._progress())

    @property
    def weights(self) -> Weights:
        """The weights, on the first replica's devices."""
        return self.replicas[0].weights

    @property
    def num_programs(self) -> int:
        """The programs that `warm_up` compiles: each replica has its own, for its devices."""
        return sum(engine.num_programs for engine in self.replicas)

    def warm_up(self, on_progress: Callable[[str], None] = lambda program: None) -> None:
        """Compile every program that serving needs; `on_progress` gets the name of each one.

        One replica after the other: on a GPU those of the second come from the compilation cache.
        """
        for number, engine in enumerate(self.replicas):
            engine.warm_up(lambda program, n=number: on_progress(f"{program}, replica {n}"))

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Request]:
        """`Engine.add`, on the replica with the fewest tokens ahead. All samples of a prompt go to
        one replica, where they share its pages."""
        params = params or SamplingParams()
        base_id = request_id if request_id is not None else new_id(self._num_added, self._requests)
        check_ids(sample_ids(base_id, params.n), self._requests)
        max_len, _ = self.check(prompt_token_ids, params, priority=priority)
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(32))
        prompt_lens = self._prompt_lens(prompt_token_ids, params, max_len, cache_salt)
        number = self._router.choose([params.n * n for n in prompt_lens], self._progress())
        requests = self.replicas[number].add(
            prompt_token_ids,
            params,
            request_id=base_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        for request in requests:
            self._num_added += 1
            self._requests[request.id] = request
            self._router.take(
                request,
                number,
                prompt_len=prompt_lens[number],
                most_output=request.max_output_len,
            )
        return requests

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> Admissible:
        """Raise the `InvalidRequestError` that `add` would, but for a request id in use.

        Nothing is queued; any thread may call this.
        """
        return self.replicas[0].check(prompt_token_ids, params, priority=priority)

    def abort(self, request_id: str) -> bool:
        """End a request now; its pages are free at once. False if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        number = self._router.replica_of(request)
        assert number is not None
        is_ended = self.replicas[number].abort(request_id)
        self._end(request)
        return is_ended

    def clear_prefix_cache(self) -> None:
        """Forget which prefixes the pages hold; running requests go on, and share nothing more."""
        for engine in self.replicas:
            engine.clear_prefix_cache()

    def step(self) -> list[Update]:
        """Begin a step on every replica that has requests, and end those that are finished, or the
        one that will be first. Returns their updates, one for each request.

        An exception of one replica leaves it sound (`Engine.step`) and stops no other: their
        updates come with the next step. Ctrl-C ends the round where it is.
        """
        start = time.perf_counter()
        self._done = None
        errors: list[Exception] = []
        ended: list[StepStats] = []
        begun: list[Engine] = []
        for engine in self.replicas:
            if engine.has_requests:
                with _collecting(errors):
                    engine.begin_step()
                    begun.append(engine)
        for engine in _due(begun):
            with _collecting(errors):
                self._unreported += engine.end_step()
                ended.append(engine.stats.last_step)
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("replicas failed", errors)
        updates, self._unreported = self._unreported, []
        for update in updates:
            if update.finish_reason is not None:
                self._end(update.request)
        self._last_step = StepStats(
            sum(step.num_rows for step in ended),
            sum(step.num_tokens for step in ended),
            time.perf_counter() - start,
            sum(step.wait_s for step in ended),
        )
        return updates

    def _prompt_lens(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, max_len: int, salt: str
    ) -> list[int]:
        """The prompt tokens that each replica would compute; the last token always is."""
        num_tokens = len(prompt_token_ids)
        root = self.replicas[0].cache_root(params, max_len, salt)
        if root is None:
            return [num_tokens] * len(self.replicas)
        cached = [e.pool.num_cached_prefix(root, prompt_token_ids) for e in self.replicas]
        return [max(num_tokens - n, 1) for n in cached]

    def _progress(self) -> list[int]:
        """The cost that each replica's running requests have done; counted once for each step."""
        if self._done is None:
            self._done = [
                sum(
                    self._router.done(r, r.extend_len, r.output_len)
                    for r in engine.scheduler.running
                )
                for engine in self.replicas
            ]
        return self._done

    def _end(self, request: Request) -> None:
        """Forget a request, if it is still known: another request may have its id by now."""
        if self._requests.get(request.id) is not request:
            return
        del self._requests[request.id]
        is_whole = request.finish_reason not in (None, FinishReason.ABORT)
        self._router.end(request, len(request.output_token_ids) if is_whole else None)
        self._done = None


@contextlib.contextmanager
def _collecting(errors: list[Exception]) -> Iterator[None]:
    """Add an exception that ends the block to `errors`."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def _due(begun: list[Engine]) -> list[Engine]:
    """Return the engines that need not wait for their devices; if there are none, the one with the
    shortest step."""
    ready = [engine for engine in begun if not engine.num_awaited]
    return ready or sorted(begun, key=lambda engine: engine.num_awaited)[:1]


def make_engine(
    models: Sequence[ShardedModel], weights: Weights, config: EngineConfig, **named: Any
) -> EngineLike:
    """Return an engine on each model's mesh, as one. The weights are on the first mesh, and copied
    to the others; `named` are arguments of `Engine`."""
    engines = [Engine(models[0], weights, config, **named)]
    for model in models[1:]:
        engines.append(Engine(model, _copied(weights, model), config, **named))
    return Replicas(engines) if len(engines) > 1 else engines[0]


def _copied(weights: Weights, model: ShardedModel) -> Weights:
    return tuple(
        jax.device_put(weight, tree_shardings(weight, spec, model.shardings[spec.path]))
        for weight, spec in zip(weights, model.parameters, strict=True)
    )
