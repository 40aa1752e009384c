"""Traces: one OpenTelemetry span a request, sent to `serving.otlp_endpoint`.

This module needs the extra `tracing`, and is imported only if an endpoint is set. A span is created
when its request has ended, from the times recorded until then, so that a token costs nothing.
Attributes are named by OpenTelemetry's conventions for generative AI where they have a name, else
`jaxinfer.*`; they contain counts and times, no text.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from jaxinfer.serving.generation import Delta
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.request_log import MAX_NAME
from jaxinfer.serving.stream import Stream

NANOSECONDS = 1_000_000_000
EXPORT_S = 3.0  # limit for exporting a batch, including retries


class Tracing:
    """Passes a span of every ended request to `exporter`, in batches, in a thread of its own."""

    def __init__(self, exporter: SpanExporter, *, model_name: str):
        version = importlib.metadata.version("jaxinfer")
        about = {"service.name": "jaxinfer", "service.version": version}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxinfer.serving", version)
        self._model_name = model_name
        self._finish_reasons: dict[Stream, dict[int, str]] = {}
        self.observer = Observer(on_delta=self._on_delta, on_end=self._on_end)

    def close(self) -> None:
        """Send the spans that wait; blocks while the exporter tries."""
        self._provider.shutdown()

    def _on_delta(self, stream: Stream, delta: Delta) -> None:
        if delta.finish_reason is not None:
            reasons = self._finish_reasons.setdefault(stream, {})
            reasons[delta.index] = str(delta.finish_reason)

    def _on_end(self, stream: Stream) -> None:
        reasons = self._finish_reasons.pop(stream, {})
        timing, error = stream.timing, stream.error
        end = time.time_ns()
        start = end - int((timing.total_s or 0.0) * NANOSECONDS)
        verb = "embed" if stream.request.operation == "embeddings" else "generate"
        span = self._tracer.start_span(
            f"{verb} {self._model_name}", kind=SpanKind.SERVER, start_time=start
        )
        span.set_attributes(self._attributes(stream, [reasons[i] for i in sorted(reasons)]))
        for name, seconds in (("admitted", timing.queue_s), ("first_token", timing.first_token_s)):
            if seconds is not None:
                span.add_event(name, timestamp=start + int(seconds * NANOSECONDS))
        if error is not None:
            span.set_attribute("error.type", error.kind.name.lower())
            span.set_status(Status(StatusCode.ERROR, error.message[:MAX_NAME]))
        span.end(end)

    def _attributes(
        self, stream: Stream, finish_reasons: Sequence[str]
    ) -> dict[str, str | int | float | Sequence[str]]:
        request, usage, timing = stream.request, stream.usage, stream.timing
        attributes: dict[str, str | int | float | Sequence[str]] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.temperature": request.params.temperature,
            "gen_ai.request.top_p": request.params.top_p,
            "gen_ai.request.choice.count": request.params.n,
            "gen_ai.response.id": stream.id[:MAX_NAME],
            "gen_ai.response.finish_reasons": list(finish_reasons),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "jaxinfer.cached_tokens": usage.cached_tokens,
            "jaxinfer.protocol": request.protocol,
        }
        if request.params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.params.max_tokens
        for name in ("queue_s", "first_token_s", "total_s"):
            if (seconds := getattr(timing, name)) is not None:
                attributes[f"jaxinfer.{name}"] = seconds
        return attributes


def otlp_tracing(endpoint: str, *, model_name: str, timeout_s: float = EXPORT_S) -> Tracing:
    """Traces over OTLP/HTTP; `endpoint` is the collector's URL, such as http://127.0.0.1:4318.

    A batch that the collector does not accept in `timeout_s` is dropped; no request waits for it.
    """
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=timeout_s)
    return Tracing(exporter, model_name=model_name)
