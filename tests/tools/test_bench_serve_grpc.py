"""The load client's two gRPC clients against a server that each test scripts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.tools.load_client import frames, load, workload

Answer = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """The address of a server whose `Generate` is `answer`."""
    handler = grpc.unary_stream_rpc_method_handler(
        answer,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler("jaxinfer.v1.Inference", {"Generate": handler})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def records_of(answer: Answer, api: str, count: int = 1, timeout_s: float = 10.0) -> list[Any]:
    """Send requests to `answer` and return the records."""

    async def main() -> list[Any]:
        async with asyncio.timeout(30), serving(answer) as address:
            fields = {"temperature": 0.5, "user": "somebody"}
            target = load.Endpoint(api, address, "model", "secret", fields)
            jobs = [workload.LoadJob([5, 6], 7 + i, 0.0) for i in range(count)]
            async with load.open_client(target, count) as client:
                return (await load.run_load(client, jobs, timeout_s=timeout_s)).records

    return asyncio.run(main())


async def _text(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    keys = dict(context.invocation_metadata())
    assert keys["authorization"] == "Bearer secret"
    assert list(request.token_ids.ids) == [5, 6] and request.model == "model"
    assert request.params.temperature == 0.5 and request.user == "somebody"
    yield pb.GenerateResponse(started=pb.Started(prompt_tokens=2))
    yield pb.GenerateResponse(sample=pb.Sample(text="x" * 1000, token_ids=[1]))
    yield pb.GenerateResponse(sample=pb.Sample(token_ids=[2]))  # half a character
    usage = pb.Usage(prompt_tokens=2, output_tokens=request.params.max_tokens)
    yield pb.GenerateResponse(sample=pb.Sample(text="y"), finished=pb.Finished(usage=usage))


async def _refuse(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    context.set_trailing_metadata([("retry-after", "1"), ("more-bin", b"\x00\xff")])
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    yield pb.GenerateResponse()


async def _hang(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(sample=pb.Sample(text="x"))
    await asyncio.sleep(60)


@pytest.mark.parametrize("api", ["grpc", "frames"])
def test_answers_are_recorded(api):
    records = records_of(_text, api, count=5)
    assert [r.error for r in records] == [None] * 5
    assert [r.output_tokens for r in records] == [7, 8, 9, 10, 11]
    for record in records:
        assert record.status == "OK" and record.prompt_tokens == 2
        assert len(record.times) == 2  # events with text
        assert record.sent <= record.times[0] <= record.times[1] <= record.end


@pytest.mark.parametrize("api", ["grpc", "frames"])
def test_refusals_are_recorded_by_status(api):
    for record in records_of(_refuse, api, count=3):
        assert record.error == record.status == "RESOURCE_EXHAUSTED"
        assert record.detail == "the queue is full" and not record.times


@pytest.mark.parametrize("api", ["grpc", "frames"])
def test_unending_call_times_out(api):
    [record] = records_of(_hang, api, timeout_s=0.5)
    assert record.error == "timeout" and len(record.times) == 1


def test_deadline_is_set_on_the_call():
    async def main() -> None:
        async with (
            asyncio.timeout(30),
            serving(_hang) as address,
            load.open_client(load.Endpoint("grpc", address)) as client,
        ):
            record, job = load.Record(0, 0.0), workload.LoadJob("text", 1)
            await load.send_one(client, job, record, lambda: 0.0, 20.0, {"deadline_s": 0.3})
            assert record.error == "DEADLINE_EXCEEDED"

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{"temprature": 0}, {"temperature": "hot"}])
def test_unknown_message_fields_are_refused(fields):
    async def main() -> None:
        with pytest.raises(workload.WorkloadError, match=next(iter(fields))):
            load.Endpoint("grpc", "127.0.0.1:1", fields=fields).client()

    asyncio.run(main())


def test_plain_headers_are_found():
    block = b"\x88\x40\x0bgrpc-status\x018\x40\x0cgrpc-message\x04full"
    assert frames.plain_header(block, "grpc-status") == "8"
    assert frames.plain_header(block, "grpc-message") == "full"
    assert frames.plain_header(block, "retry-after") is None
    assert frames.plain_header(b"\x40\x0bgrpc-status\x81\x1f", "grpc-status") is None  # compressed
