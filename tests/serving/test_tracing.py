"""Traces: one span for every request, with usage and times and without text."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxinfer import Engine, SamplingParams
from jaxinfer.serving.errors import ServiceError
from jaxinfer.serving.generation import GenerationRequest, Result
from jaxinfer.serving.tracing import Tracing, otlp_tracing
from tests.support.tiny_server import tiny_engine, tiny_service


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


def traced(
    engine: Engine, *requests: GenerationRequest, is_cancelled: bool = False
) -> tuple[Sequence[Any], list[Any]]:
    """Run requests one after another; return their spans and results."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, model_name="tiny")
    results = asyncio.run(serve(engine, tracing, requests, is_cancelled))
    tracing.close()
    return exporter.get_finished_spans(), results


async def serve(engine, tracing, requests, is_cancelled=False) -> list[Result]:
    results = []
    async with asyncio.timeout(60):
        async with tiny_service(engine, observers=(tracing.observer,)) as service:
            for request in requests:
                stream = await service.generate(request)
                if is_cancelled:
                    stream.cancel()
                    with pytest.raises(ServiceError):
                        await stream.collect()
                else:
                    results.append(await stream.collect())
    return results


def test_request_makes_one_span_with_usage_and_times(engine):
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=6, ignore_eos=True, n=2)
    request = GenerationRequest("a secret", params, protocol="grpc", request_id="mine", user="ada")
    [span], [result] = traced(engine, request)
    assert span.name == "generate tiny" and span.kind is SpanKind.SERVER
    assert span.resource.attributes["service.name"] == "jaxinfer"
    attributes = dict(span.attributes)
    expected = {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": result.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 12,
        "jaxinfer.protocol": "grpc",
    }
    assert {name: attributes[name] for name in expected} == expected
    assert attributes["jaxinfer.total_s"] == result.timing.total_s
    assert span.end_time - span.start_time == pytest.approx(result.timing.total_s * 1e9, rel=1e-6)
    events = {event.name: event.timestamp - span.start_time for event in span.events}
    assert events["first_token"] == pytest.approx(result.timing.first_token_s * 1e9, rel=1e-6)
    assert 0 <= events["admitted"] <= events["first_token"] <= span.end_time - span.start_time
    assert span.status.status_code is StatusCode.UNSET
    assert "secret" not in span.to_json()


def test_failed_request_makes_a_span_with_its_error(engine):
    request = GenerationRequest("a prompt", SamplingParams())
    [span], _ = traced(engine, request, is_cancelled=True)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "cancelled"
    assert not span.events and span.attributes["gen_ai.usage.output_tokens"] == 0


def test_each_request_has_its_own_trace_and_state_is_released(engine):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    spans, _ = traced(engine, *[GenerationRequest("a prompt", params)] * 3)
    assert len({span.context.trace_id for span in spans}) == 3
    assert all(span.parent is None for span in spans)


def test_missing_collector_delays_neither_requests_nor_shutdown(engine):
    num_threads = threading.active_count()
    tracing = otlp_tracing("http://127.0.0.1:1/", model_name="tiny", timeout_s=0.5)
    request = GenerationRequest("a prompt", SamplingParams(max_tokens=2, ignore_eos=True))
    [result] = asyncio.run(serve(engine, tracing, [request]))
    assert result.usage.output_tokens == 2
    start = time.monotonic()
    tracing.close()
    assert time.monotonic() - start < 3
    assert threading.active_count() == num_threads  # its own has ended
