"""Which texts go through an encoder together, and in which shape: integers only.

A batch is rows of one padded length. Both come in few sizes, so that few programs are compiled:
lengths grow by `bucket_growth` from `SMALLEST_LENGTH` (or `min_bucket`) to the longest text, rows
by `ROW_GROWTH` from 1 to as many as `scheduler.max_num_batched_tokens` padded tokens and
`scheduler.max_num_seqs`
let in; a text longer than `scheduler.max_num_batched_tokens` is a batch of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxinfer.config import EngineConfig
from jaxinfer.engine.request import Request
from jaxinfer.options import ConfigError

SMALLEST_LENGTH = 16  # tokens: a query's; below it the weights are most of what is read anyway
ROW_GROWTH = 8  # of one number of rows to the next: at most three programs a length by default
# Options that change nothing here: `check_config` refuses them.
_GENERATION_ALONE = ("cache", "seed", "batch_invariant", "check_every_step", "mesh")


class Bucket(NamedTuple):
    """The shape of a program."""

    rows: int
    length: int


class Batch(NamedTuple):
    """A row each; fewer than the bucket's where the rest is padding."""

    bucket: Bucket
    requests: list[Request]

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return sum(request.prompt_len for request in self.requests)


def buckets_for(config: EngineConfig, max_model_len: int) -> tuple[Bucket, ...]:
    """Every shape that is compiled, by length, then rows; the module's text has the rule."""
    lengths, length = [], max(config.min_bucket, SMALLEST_LENGTH)
    while length < max_model_len:
        lengths.append(length)
        length *= config.bucket_growth
    buckets = []
    for length in (*lengths, max_model_len):
        most = max(
            1, min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens // length)
        )
        rows = 1
        while rows < most:
            buckets.append(Bucket(rows, length))
            rows *= ROW_GROWTH
        buckets.append(Bucket(most, length))
    return tuple(buckets)


def check_config(config: EngineConfig) -> None:
    """Refuse options that only a model which generates can honour; `ConfigError` names them."""
    default = EngineConfig()
    names = [name for name in _GENERATION_ALONE if getattr(config, name) != getattr(default, name)]
    if config.load_format == "random":  # weights are drawn from the seed
        names = [name for name in names if name != "seed"]
    if config.scheduler.policy != default.scheduler.policy:
        names.append("scheduler.policy")
    if names:
        raise ConfigError(
            f"{', '.join(names)}: for models that generate, and this one is an encoder; leave them "
            "out (an encoder has dtype, max_model_len, overlap, min_bucket, bucket_growth, "
            "warm_up, attention_backend, load_format, weights, quantize, "
            "scheduler.max_num_batched_tokens and scheduler.max_num_seqs; it runs on one device)"
        )


class WaitingTexts:
    """Requests that wait, by the padded length they need; those that have finished are dropped."""

    def __init__(self, buckets: Sequence[Bucket]):
        self._rows: dict[int, list[int]] = {}
        for bucket in buckets:
            self._rows.setdefault(bucket.length, []).append(bucket.rows)
        self._queues = {length: collections.deque[Request]() for length in self._rows}

    def add(self, request: Request) -> None:
        self._queue_of(request).append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Those that were taken for a batch that came to nothing: before all others again."""
        for request in sorted(requests, key=lambda request: request.arrival, reverse=True):
            self._queue_of(request).appendleft(request)

    def take(self) -> Batch | None:
        """The oldest text and those of its length; rows that would be padding otherwise go to
        shorter ones. None: nothing waits."""
        heads = {}
        for length, queue in self._queues.items():
            while queue and queue[0].is_finished:
                queue.popleft()
            if queue:
                heads[length] = queue[0].arrival
        if not heads:
            return None
        length = min(heads, key=lambda length: heads[length])
        sizes = self._rows[length]
        requests = list(_taken(self._queues[length], sizes[-1]))
        rows = next(size for size in sizes if size >= len(requests))
        for shorter in sorted((key for key in heads if key < length), reverse=True):
            requests += _taken(self._queues[shorter], rows - len(requests))
        return Batch(Bucket(rows, length), requests)

    def _queue_of(self, request: Request) -> collections.deque[Request]:
        length = next(length for length in self._queues if length >= request.prompt_len)
        return self._queues[length]


def _taken(queue: collections.deque[Request], most: int) -> Iterator[Request]:
    """Up to `most` from the front that have not finished."""
    while queue and most > 0:
        request = queue.popleft()
        if not request.is_finished:
            most -= 1
            yield request
