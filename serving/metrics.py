"""The server's Prometheus metrics: counts and latencies of requests, and the engine's counters.

    metrics = Metrics(health)
    loop = EngineLoop(engine, limits, observers=(metrics.observer,))
    metrics.watch(loop, service.model.name)
    body, content_type = metrics.render()     # for GET /metrics

An `Observer` counts requests with plain additions, since it is called for every token; the
exposition is built when it is scraped. All methods are for the event loop's thread. Labels have few
values, all known beforehand: never a request's id, user or text.

* A request that got a stream counts once in `requests_total`, when it ends, by its finish reason
  (`length` if any of its samples reached its length) or the kind of its error. One that was refused
  before counts in `requests_refused_total`, to which the HTTP and gRPC servers add by
  `count_refusal`.
* Latencies are measured from when the service received the request. Inter-token latency is the time
  between two tokens of one sample: the samples of a prompt advance in the same step, so gaps
  between tokens of different samples would mean little. Several tokens in one delta are one
  observation, of their mean.
* A step's `device` seconds are those in which its thread was blocked on the device, `host` all
  others: with overlap the device works during both.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector

from jaxinfer import EngineLike, FinishReason
from jaxinfer.engine.stats import EngineStats
from jaxinfer.serving.errors import ErrorKind
from jaxinfer.serving.generation import Delta
from jaxinfer.serving.health import Health, State
from jaxinfer.serving.loop import EngineLoop
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.stream import Stream

PREFIX = "jaxinfer_"


def _bounds(first: float, last: float) -> tuple[float, ...]:
    """1, 2, 5, 10, ... times `first`, up to `last`."""
    steps = (first * 10**decade * digit for decade in range(12) for digit in (1, 2, 5))
    return tuple(float(f"{step:.3g}") for step in steps if step <= last * 1.001)


LATENCIES_S = _bounds(1e-3, 100)
STEPS_S = _bounds(1e-4, 10)
TOKENS = tuple(float(2**i) for i in range(14))


class Histogram:
    """Counts of observations by upper bound."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as the exposition format has them."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets


class _Progress:
    """The state of one unfinished request: when each sample had its last token, and its end."""

    __slots__ = ("last_token", "reached_length")

    def __init__(self, num_samples: int):
        self.last_token: list[float | None] = [None] * num_samples
        self.reached_length = False  # whether a sample did


class Metrics:
    """Counts and histograms of one server; see the module's docstring."""

    def __init__(self, health: Health | None = None):
        self._health = health or Health()
        self._loop: EngineLoop | None = None
        self._build = {
            "version": importlib.metadata.version("jaxinfer"),
            "jax": importlib.metadata.version("jax"),
            "python": platform.python_version(),
        }
        self._progress: dict[Stream, _Progress] = {}
        self._ended: Counter[tuple[str, str]] = Counter()  # (protocol, outcome)
        self._refused: Counter[tuple[str, str]] = Counter()  # (protocol, kind)
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._first_token = Histogram(LATENCIES_S)
        self._inter_token = Histogram(LATENCIES_S)
        self._queue = Histogram(LATENCIES_S)
        self._total = Histogram(LATENCIES_S)
        self._step_host = Histogram(STEPS_S)
        self._step_device = Histogram(STEPS_S)
        self._step_tokens = Histogram(TOKENS)
        self.observer = Observer(self._on_step, self._on_delta, self._on_end)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # process_*: memory, CPU, files; standard names

    def watch(self, loop: EngineLoop, model_name: str) -> None:
        """Report this engine from now on."""
        self._loop = loop
        self._build["model"] = model_name

    def count_refusal(self, protocol: str, kind: ErrorKind) -> None:
        """Count a request that was refused before it had a stream.

        A caller of `Service.generate` or `embed` that catches its `ServiceError`, or refuses
        a request without calling it, reports the refusal here.
        """
        self._refused[protocol, kind.name.lower()] += 1

    def render(self) -> tuple[bytes, str]:
        """The body and the content type of the response to a scrape."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """The current values of all metrics; called by the registry."""
        build = InfoMetricFamily(f"{PREFIX}build", "Versions, and the model once it is loaded")
        build.add_metric((), self._build)
        yield build
        yield _gauge_by("state", "health", "1 for the current state of the server", self._states())
        yield from self._request_counters()
        yield from self._histograms()
        if self._loop is not None:
            yield from _engine_gauges(self._loop.stats)
            yield from _engine_counters(self._loop.stats)
            if len(self._loop.engine.replicas) > 1:
                yield from _replica_gauges(self._loop.engine)
            num_streams = self._loop.num_streams
            yield _gauge("requests_in_flight", "Requests accepted and not ended", num_streams)

    def _on_step(self, stats: EngineStats) -> None:
        step = stats.last_step
        self._step_host.observe(step.total_s - step.wait_s)
        self._step_device.observe(step.wait_s)
        self._step_tokens.observe(step.num_tokens)

    def _on_delta(self, stream: Stream, delta: Delta) -> None:
        now = time.monotonic()
        progress = self._progress.get(stream)
        if progress is None:
            progress = self._first_delta(stream)
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self._output_tokens += num_tokens
            before = progress.last_token[delta.index]
            if before is not None:
                self._inter_token.observe((now - before) / num_tokens)
            progress.last_token[delta.index] = now
        if delta.finish_reason == FinishReason.LENGTH:
            progress.reached_length = True

    def _first_delta(self, stream: Stream) -> _Progress:
        timing, usage = stream.timing, stream.usage
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        if timing.queue_s is not None:
            self._queue.observe(timing.queue_s)
        if timing.first_token_s is not None and usage.output_tokens:
            self._first_token.observe(timing.first_token_s)
        progress = self._progress[stream] = _Progress(stream.request.params.n)
        return progress

    def _on_end(self, stream: Stream) -> None:
        progress = self._progress.pop(stream, None)
        if stream.error is not None:
            outcome = stream.error.kind.name.lower()
        else:
            reached_length = progress is not None and progress.reached_length
            outcome = (FinishReason.LENGTH if reached_length else FinishReason.STOP).value
        self._ended[stream.request.protocol, outcome] += 1
        if stream.timing.total_s is not None:
            self._total.observe(stream.timing.total_s)

    def _states(self) -> dict[str, float]:
        return {s.name.lower(): float(s is self._health.state) for s in State}

    def _request_counters(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            f"{PREFIX}requests",
            "Requests that have ended, by outcome",
            labels=("protocol", "outcome"),
        )
        for labels, count in self._ended.items():
            ended.add_metric(labels, count)
        refused = CounterMetricFamily(
            f"{PREFIX}requests_refused",
            "Requests refused before they were queued",
            labels=("protocol", "kind"),
        )
        for labels, count in self._refused.items():
            refused.add_metric(labels, count)
        unread = sum(stream.num_unread for stream in self._progress)
        yield ended
        yield refused
        yield _counter(
            "prompt_tokens", "Prompt tokens of requests that have begun", self._prompt_tokens
        )
        yield _counter(
            "cached_tokens", "Prompt tokens found in the prefix cache", self._cached_tokens
        )
        yield _counter("output_tokens", "Tokens generated for clients", self._output_tokens)
        yield _gauge("unread_tokens", "Generated tokens that clients have not read yet", unread)

    def _histograms(self) -> Iterator[Metric]:
        of_requests = {
            "queue_seconds": ("Time until the scheduler admitted a request", self._queue),
            "first_token_seconds": ("Time until the first token of a request", self._first_token),
            "inter_token_seconds": (
                "Time from one token of a sample to the next",
                self._inter_token,
            ),
            "request_seconds": (
                "Time until a request ended, with or without an error",
                self._total,
            ),
            "step_tokens": ("Tokens that a step ran through the model", self._step_tokens),
        }
        for name, (text, histogram) in of_requests.items():
            family = HistogramMetricFamily(PREFIX + name, text)
            family.add_metric((), histogram.buckets(), histogram.sum)
            yield family
        family = HistogramMetricFamily(
            f"{PREFIX}step_seconds",
            "Time of a step: blocked on the device, or not",
            labels=("part",),
        )
        for part, histogram in (("host", self._step_host), ("device", self._step_device)):
            family.add_metric((part,), histogram.buckets(), histogram.sum)
        yield family


def _engine_gauges(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("requests_running", "Samples in the running batch", stats.num_running)
    yield _gauge("requests_waiting", "Samples waiting for admission", stats.num_waiting)
    owned, cached = stats.num_owned_pages, stats.num_cached_pages
    pages = {"free": stats.num_pages - owned - cached, "cached": cached, "owned": owned}
    yield _gauge_by("state", "pages", "Pages of the KV cache", pages)


def _replica_gauges(engine: EngineLike) -> Iterator[Metric]:
    """Counts of each replica, read while the engine's thread runs."""
    by_number = {str(number): replica for number, replica in enumerate(engine.replicas)}
    requests = {number: replica.num_requests for number, replica in by_number.items()}
    pages = {number: replica.pool.num_owned for number, replica in by_number.items()}
    yield _gauge_by("replica", "replica_requests", "Samples of a replica", requests)
    yield _gauge_by("replica", "replica_pages_owned", "Pages in use by a replica", pages)


def _engine_counters(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("steps", "Steps of the engine, or of all replicas", stats.num_steps)
    yield _counter("computed_tokens", "Tokens run through the model", stats.num_computed)
    yield _counter("generated_tokens", "Tokens sampled", stats.num_generated)
    hits = "Tokens not computed because the prefix cache had them"
    yield _counter("prefix_cache_hit_tokens", hits, stats.num_shared)
    yield _counter("preemptions", "Samples preempted, to be computed again", stats.num_preemptions)
    yield _counter(
        "compiles", "Programs compiled or read from the compilation cache", stats.num_compiled
    )
    late = "Programs compiled after warm-up, while requests waited"
    yield _counter("late_compiles", late, stats.num_late_compiles)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _gauge_by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    """A gauge with one sample for each value of `label`."""
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=(label,))
    for value, number in values.items():
        gauge.add_metric((value,), number)
    return gauge
