"""Batch texts for an encoder, in a small set of padded shapes. Integers only, no arrays.

A batch is a number of rows of one padded length. There are few sizes of either, so that few
programs are compiled: lengths grow by `bucket_growth` from `SMALLEST_LENGTH` (or `min_bucket`) to
the longest text; row counts grow by `ROW_GROWTH` from 1 to the limit that
`scheduler.max_num_batched_tokens` (padded tokens) and `scheduler.max_num_seqs` set. A text longer
than `scheduler.max_num_batched_tokens` forms a batch of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxinfer.config import EngineConfig
from jaxinfer.engine.request import Request
from jaxinfer.options import ConfigError

SMALLEST_LENGTH = 16  # tokens of a short query; below it, reading the weights dominates the time
ROW_GROWTH = 8  # ratio of successive row counts: by default at most three programs per length
# Options that do not apply to an encoder: `check_encoder_config` refuses them.
_GENERATION_OPTIONS = ("cache", "seed", "batch_invariant", "check_every_step", "mesh")


class TextBucket(NamedTuple):
    """The padded shape of a compiled program."""

    rows: int
    length: int


class TextBatch(NamedTuple):
    """Requests that run together, one per row; the bucket's remaining rows are padding."""

    bucket: TextBucket
    requests: list[Request]

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(request.prompt_len for request in self.requests)


def buckets_for(config: EngineConfig, max_model_len: int) -> tuple[TextBucket, ...]:
    """List every shape that is compiled, ordered by length, then by rows (see the module text)."""
    lengths, length = [], max(config.min_bucket, SMALLEST_LENGTH)
    while length < max_model_len:
        lengths.append(length)
        length *= config.bucket_growth
    buckets = []
    for length in (*lengths, max_model_len):
        max_rows = max(
            1, min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens // length)
        )
        rows = 1
        while rows < max_rows:
            buckets.append(TextBucket(rows, length))
            rows *= ROW_GROWTH
        buckets.append(TextBucket(max_rows, length))
    return tuple(buckets)


def check_encoder_config(config: EngineConfig) -> None:
    """Raise a `ConfigError` that names the options only a generating model can honour."""
    default = EngineConfig()
    names = [
        name for name in _GENERATION_OPTIONS if getattr(config, name) != getattr(default, name)
    ]
    if config.load_format == "random":  # weights are drawn from the seed
        names = [name for name in names if name != "seed"]
    if config.scheduler.policy != default.scheduler.policy:
        names.append("scheduler.policy")
    if names:
        raise ConfigError(
            f"{', '.join(names)}: only generating models have these options, and this model is an "
            "encoder; leave them out (an encoder has dtype, max_model_len, overlap, min_bucket, "
            "bucket_growth, warm_up, attention_backend, load_format, weights, quantize, "
            "scheduler.max_num_batched_tokens and scheduler.max_num_seqs; it runs on one device)"
        )


class WaitingTexts:
    """Waiting requests, queued by the padded length they need; finished ones are dropped."""

    def __init__(self, buckets: Sequence[TextBucket]):
        self._rows: dict[int, list[int]] = {}
        for bucket in buckets:
            self._rows.setdefault(bucket.length, []).append(bucket.rows)
        self._queues = {length: collections.deque[Request]() for length in self._rows}

    def add(self, request: Request) -> None:
        self._queue_of(request).append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Requeue, ahead of all others, the requests of a batch that failed."""
        for request in sorted(requests, key=lambda request: request.rank.arrival, reverse=True):
            self._queue_of(request).appendleft(request)

    def take(self) -> TextBatch | None:
        """Take the oldest text and others of its padded length, or None if nothing waits.

        Rows that would otherwise be padding go to shorter texts.
        """
        heads = {}
        for length, queue in self._queues.items():
            while queue and queue[0].is_finished:
                queue.popleft()
            if queue:
                heads[length] = queue[0].rank.arrival
        if not heads:
            return None
        length = min(heads, key=lambda length: heads[length])
        sizes = self._rows[length]
        requests = list(_take_unfinished(self._queues[length], sizes[-1]))
        rows = next(size for size in sizes if size >= len(requests))
        for shorter in sorted((key for key in heads if key < length), reverse=True):
            requests += _take_unfinished(self._queues[shorter], rows - len(requests))
        return TextBatch(TextBucket(rows, length), requests)

    def _queue_of(self, request: Request) -> collections.deque[Request]:
        length = next(length for length in self._queues if length >= request.prompt_len)
        return self._queues[length]


def _take_unfinished(queue: collections.deque[Request], max_requests: int) -> Iterator[Request]:
    """Pop up to `max_requests` unfinished requests from the front of the queue."""
    while queue and max_requests > 0:
        request = queue.popleft()
        if not request.is_finished:
            max_requests -= 1
            yield request
