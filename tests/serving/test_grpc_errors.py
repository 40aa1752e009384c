"""Errors of the gRPC server: their codes and their metadata."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from jaxinfer import Engine
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from tests.support.grpc_harness import EOF, config, error_of, grpc_harness, make_request, run
from tests.support.tiny_server import Brake, tiny_engine

CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


@pytest.fixture
def brake(engine):
    """A brake on the shared engine, for one test."""
    brake = Brake(engine)
    yield brake
    brake.release()
    del engine.step  # the instance's own: the class's is back


REFUSED = [
    ("temperature", make_request(params={"temperature": -1.0}), "1e-06"),
    ("n", make_request(params={"n": 1000}), "128"),
    ("seed", make_request(params={"seed": 2**40}), "4294967295"),
    (
        "stop_token_ids",
        make_request(params={"stop_token_ids": pb.TokenIds(ids=[2**33])}),
        "token ids",
    ),
    ("allowed_token_ids", make_request(params={"allowed_token_ids": pb.TokenIds()}), "non-empty"),
    ("priority", make_request(priority=3), "scheduler.policy"),
    ("timeout_s", make_request(timeout_s=-1.0), "-1"),
    ("timeout_s", make_request(timeout_s=float("nan")), "nan"),
    ("prompt", pb.GenerateRequest(), "set one of text, token_ids, chat"),
    ("prompt", make_request(token_ids=pb.TokenIds(ids=[2**40])), "vocabulary"),
    ("prompt", make_request(token_ids=pb.TokenIds()), "empty"),
    ("prompt", make_request("x" * 600), "512"),
    (
        "messages",
        make_request(chat=pb.Chat(messages=[pb.ChatMessage(role="", content="a")])),
        "role",
    ),
]


@pytest.mark.parametrize(("field", "request_", "text"), REFUSED)
def test_bad_value_is_an_invalid_argument_with_its_field(engine, field, request_, text):
    async def main():
        async with grpc_harness(engine) as harness:
            for method in (harness.stub.Complete, harness.stub.Generate):
                error = await error_of(method(request_))
                assert error.code() is CODES.INVALID_ARGUMENT and text in error.details()
                said = dict(error.trailing_metadata())
                assert said["field"] == field and "retry-after" not in said
                status = status_pb2.Status.FromString(said["grpc-status-details-bin"])
                assert (status.code, status.message) == (3, error.details())
                detail = error_details_pb2.BadRequest()
                assert status.details[0].Unpack(detail)
                assert [violation.field for violation in detail.field_violations] == [field]

    run(main())


def test_bad_arguments_of_other_methods_name_their_field(engine):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])

    async def main():
        async with grpc_harness(engine) as harness:
            stub = harness.stub
            wrong = [
                ("prompt", stub.Tokenize(pb.TokenizeRequest())),
                (
                    "add_special_tokens",
                    stub.Tokenize(pb.TokenizeRequest(chat=chat, add_special_tokens=True)),
                ),
                ("token_ids", stub.Detokenize(pb.DetokenizeRequest(token_ids=[-1]))),
                ("token_ids", stub.Detokenize(pb.DetokenizeRequest(token_ids=[2**40]))),
            ]
            for field, call in wrong:
                error = await error_of(call)
                assert error.code() is CODES.INVALID_ARGUMENT
                assert dict(error.trailing_metadata())["field"] == field

    run(main())


def test_another_models_name_is_not_found(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            stub = harness.stub
            await stub.Complete(make_request(model="tiny"))
            for call in (
                stub.Complete(make_request(model="huge")),
                stub.Generate(make_request(model="huge")),
                stub.Tokenize(pb.TokenizeRequest(text="a", model="huge")),
                stub.Detokenize(pb.DetokenizeRequest(model="huge")),
            ):
                error = await error_of(call)
                assert error.code() is CODES.NOT_FOUND and "'tiny'" in error.details()

    run(main())


def test_error_fits_into_the_headers_for_any_input_length(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            for name in ("x" * 100_000, "字" * 100_000, "\x00🙂" * 10_000):
                error = await error_of(harness.stub.Complete(make_request(model=name)))
                assert error.code() is CODES.NOT_FOUND and error.details().endswith("...")

    run(main())


def test_request_id_in_use_already_exists(engine, brake):
    async def main():
        async with grpc_harness(engine) as harness:
            brake.hold()
            call = harness.stub.Generate(make_request(request_id="one"))
            assert (await call.read()).started.request_id == "one"
            error = await error_of(harness.stub.Complete(make_request(request_id="one")))
            assert error.code() is CODES.ALREADY_EXISTS
            brake.release()
            while await call.read() is not EOF:
                pass
            await harness.stub.Complete(make_request(request_id="one"))

    run(main())


def test_full_queue_refuses_before_the_prompt_is_tokenized(engine, brake, monkeypatch):
    async def main():
        async with grpc_harness(engine, config(max_waiting=2)) as harness:
            brake.hold()
            calls = [harness.stub.Generate(make_request()) for _ in range(4 + 2)]
            for call in calls:
                assert (await call.read()).HasField("started")
            with monkeypatch.context() as patch:
                patch.setattr(harness.service, "tokenize", None)
                for method in (harness.stub.Complete, harness.stub.Generate):
                    error = await error_of(method(make_request()))
                    assert error.code() is CODES.RESOURCE_EXHAUSTED
                    said = dict(error.trailing_metadata())
                    assert int(said["retry-after"]) >= 1
                    status = status_pb2.Status.FromString(said["grpc-status-details-bin"])
                    detail = error_details_pb2.RetryInfo()
                    assert status.details[0].Unpack(detail) and detail.retry_delay.seconds == 1
            counted = b'jaxinfer_requests_refused_total{kind="overloaded",protocol="grpc"} 2.0'
            assert counted in harness.metrics.render()[0]
            brake.release()
            for call in calls:
                while await call.read() is not EOF:
                    pass
                assert await call.code() is CODES.OK
            await harness.stub.Complete(make_request())

    run(main())


def test_many_clients_at_once_are_served_or_refused_and_none_is_lost(engine):
    async def main():
        async with grpc_harness(engine, config(max_waiting=8)) as harness:
            calls = (harness.stub.Complete(make_request(max_tokens=4)) for _ in range(200))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            served = [a for a in answers if isinstance(a, pb.CompleteResponse)]
            refused = [a for a in answers if isinstance(a, grpc.aio.AioRpcError)]
            assert len(served) + len(refused) == 200 and len(served) >= 4 + 8
            assert all(a.finished.usage.output_tokens == 4 for a in served)
            assert all(a.code() is CODES.RESOURCE_EXHAUSTED for a in refused)

    run(main())


def test_draining_server_is_unavailable_and_finishes_its_requests(engine, brake):
    async def main():
        async with grpc_harness(engine) as harness:
            brake.hold()
            call = harness.stub.Generate(make_request(max_tokens=8))
            await call.read()
            draining = asyncio.create_task(harness.service.loop.drain(30))
            await asyncio.sleep(0)
            error = await error_of(harness.stub.Complete(make_request()))
            assert error.code() is CODES.UNAVAILABLE
            assert dict(error.trailing_metadata())["retry-after"] == "5"
            brake.release()
            while (part := await call.read()) is not EOF:
                last = part
            assert last.finished.usage.output_tokens == 8 and await draining

    run(main())


def test_defect_is_internal_and_its_text_stays_in_the_log(engine, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("a secret of the server")

    async def main():
        async with grpc_harness(engine) as harness:
            monkeypatch.setattr(harness.service, "params", fail)
            for method in (harness.stub.Complete, harness.stub.Generate):
                error = await error_of(method(make_request()))
                assert error.code() is CODES.INTERNAL and "secret" not in error.details()

    with caplog.at_level(logging.ERROR):
        run(main())
    assert caplog.text.count("a secret of the server") >= 2


def test_failed_engine_fails_its_requests_and_refuses_new_ones(monkeypatch):
    engine = tiny_engine()[0]

    def fail():
        raise RuntimeError("out of memory")

    async def main():
        async with grpc_harness(engine) as harness:
            monkeypatch.setattr(engine, "step", fail)
            error = await error_of(harness.stub.Generate(make_request()))
            assert error.code() is CODES.INTERNAL and "has stopped" in error.details()
            error = await error_of(harness.stub.Complete(make_request()))
            assert error.code() is CODES.INTERNAL and "has stopped" in error.details()

    run(main())
