"""gRPC clients that cancel, time out, do not read or send malformed messages."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import Engine
from jaxinfer.serving.errors import ErrorKind
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.protos.jaxinfer.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serving.stream import Stream
from tests.support.grpc_harness import (
    EOF,
    GrpcHarness,
    Relay,
    config,
    error_of,
    grpc_harness,
    make_request,
    run,
)
from tests.support.tiny_server import Brake, tiny_engine

CODES = grpc.StatusCode
METHODS = ("Generate", "Complete", "Tokenize", "Detokenize", "GetModel", "GetStats")
# A window that a few tokens fill, and that does not grow while nobody reads.
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
BULKY = {"n": 4, "logprobs": 20, "temperature": 1.0}


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


class Ends:
    """Collects streams that have ended, to wait for."""

    def __init__(self):
        self._queue: asyncio.Queue[Stream] = asyncio.Queue()
        self.observer = Observer(on_end=self._queue.put_nowait)

    async def next(self) -> Stream:
        return await self._queue.get()


async def is_free(harness: GrpcHarness, engine: Engine) -> None:
    """Wait until the engine has no requests and no pages in use."""
    while engine.num_requests or engine.pool.num_owned:
        await asyncio.sleep(0.001)
    assert harness.service.loop.num_streams == 0


@pytest.mark.parametrize("method", ["Generate", "Complete"])
def test_cancel_frees_pages_at_once(engine, brake, method):
    ends = Ends()

    async def main():
        async with grpc_harness(engine, observers=(ends.observer,)) as harness:
            brake.seconds = 0.01
            call = getattr(harness.stub, method)(make_request(max_tokens=400))
            while not engine.pool.num_owned:
                await asyncio.sleep(0.001)
            brake.hold()
            call.cancel()
            stream = await ends.next()
            assert stream.error is not None and stream.error.kind is ErrorKind.CANCELLED
            num_steps = engine.stats.num_steps
            brake.release()
            await is_free(harness, engine)
            assert engine.stats.num_steps <= num_steps + 1

    run(main())


def test_cancel_before_tokenization_never_reaches_the_engine(engine, monkeypatch):
    ends = Ends()
    is_tokenizing = asyncio.Event()

    async def tokenize(prompt):
        is_tokenizing.set()
        await asyncio.Event().wait()

    async def main():
        async with grpc_harness(engine, observers=(ends.observer,)) as harness:
            monkeypatch.setattr(harness.service, "tokenize", tokenize)
            num_steps = engine.stats.num_steps
            call = harness.stub.Generate(make_request())
            await is_tokenizing.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()
            monkeypatch.undo()
            await harness.stub.Complete(make_request(max_tokens=1))  # the loop has turned since
            assert (await ends.next()).usage.output_tokens == 1
            assert engine.stats.num_steps - num_steps <= 3

    run(main())


def test_broken_connection_cancels_the_request(engine, brake):
    ends = Ends()

    async def main():
        async with (
            grpc_harness(engine, observers=(ends.observer,)) as harness,
            Relay(harness.port) as relay,
            grpc.aio.insecure_channel(relay.target) as channel,
        ):
            brake.seconds = 0.01
            call = InferenceStub(channel).Generate(make_request(max_tokens=400))
            await call.read()
            await call.read()
            relay.cut()
            stream = await ends.next()
            assert stream.error is not None and stream.error.kind is ErrorKind.CANCELLED
            await is_free(harness, engine)

    run(main())


def test_earlier_of_two_deadlines_ends_the_request(engine, brake):
    ends = Ends()

    async def main():
        async with grpc_harness(engine, observers=(ends.observer,)) as harness:
            brake.hold()
            for timeout, timeout_s in ((0.2, None), (None, 0.2), (0.2, 50.0), (50.0, 0.2)):
                request = make_request(max_tokens=400)
                if timeout_s is not None:
                    request.timeout_s = timeout_s
                error = await error_of(harness.stub.Generate(request, timeout=timeout))
                assert error.code() is CODES.DEADLINE_EXCEEDED
                stream = await ends.next()
                assert stream.deadline - stream.submitted_at < 0.3
            brake.release()
            await is_free(harness, engine)

    run(main())


def test_passed_deadline_costs_no_step(engine):
    ends = Ends()

    async def main():
        async with grpc_harness(engine, observers=(ends.observer,)) as harness:
            num_steps = engine.stats.num_steps
            for method in (harness.stub.Complete, harness.stub.Generate):
                error = await error_of(method(make_request(timeout_s=0.0)))
                assert error.code() is CODES.DEADLINE_EXCEEDED
                await ends.next()
            assert engine.stats.num_steps == num_steps

    run(main())


def test_call_without_a_deadline_has_the_servers(engine):
    ends = Ends()

    async def main():
        async with grpc_harness(
            engine, config(timeout_s=7.0), observers=(ends.observer,)
        ) as harness:
            for timeout in (None, 1000.0):
                await harness.stub.Complete(make_request(), timeout=timeout)
                stream = await ends.next()
                assert stream.deadline - stream.submitted_at == pytest.approx(7.0, abs=0.1)

    run(main())


def test_client_that_stops_reading_is_cut_off_without_delaying_others(engine):
    ends = Ends()

    async def main():
        limits = config(max_unread_tokens=100)
        async with (
            grpc_harness(engine, limits, observers=(ends.observer,)) as harness,
            grpc.aio.insecure_channel(harness.target, options=NARROW) as channel,
        ):
            call = InferenceStub(channel).Generate(make_request(max_tokens=400, params=BULKY))
            assert (await call.read()).HasField("started")
            stream = await ends.next()
            assert stream.error is not None and stream.error.kind is ErrorKind.SLOW_READER
            await is_free(harness, engine)
            whole = await harness.stub.Complete(make_request(max_tokens=20))
            assert whole.finished.usage.output_tokens == 20
            # Once it reads again, it learns why.
            with pytest.raises(grpc.aio.AioRpcError, match="max_unread_tokens") as caught:
                while True:
                    await call.read()
            assert caught.value.code() is CODES.ABORTED

    run(main())


def test_slow_reader_gets_joined_deltas_and_misses_nothing(engine):
    async def main():
        async with (
            grpc_harness(engine) as harness,
            grpc.aio.insecure_channel(harness.target, options=NARROW) as channel,
        ):
            request = make_request(max_tokens=200, params={"logprobs": 20})
            [whole] = (await harness.stub.Complete(request)).samples
            call = InferenceStub(channel).Generate(request)
            await call.read()
            while harness.service.loop.num_streams:  # nobody reads while it is made
                await asyncio.sleep(0.001)
            parts = []
            while (part := await call.read()) is not EOF:
                parts.append(part.sample)
            assert "".join(part.text for part in parts) == whole.text
            assert [i for part in parts for i in part.token_ids] == list(whole.token_ids)
            assert len(parts) < 100, "what waits is joined"

    run(main())


def test_client_that_reads_nothing_for_too_long_is_cancelled(engine, brake):
    ends = Ends()

    async def main():
        async with (
            grpc_harness(engine, config(send_timeout_s=0.1), observers=(ends.observer,)) as harness,
            grpc.aio.insecure_channel(harness.target, options=NARROW) as channel,
        ):
            brake.seconds = 0.005  # it is under way for two seconds
            call = InferenceStub(channel).Generate(make_request(max_tokens=400, params=BULKY))
            await call.read()
            stream = await ends.next()
            assert stream.error is not None and stream.error.kind is ErrorKind.CANCELLED
            await is_free(harness, engine)
            with pytest.raises(grpc.aio.AioRpcError, match="send_timeout_s") as caught:
                while True:
                    await call.read()
            assert caught.value.code() is CODES.ABORTED

    run(main())


def test_malformed_message_is_refused_and_the_server_goes_on(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            for method in METHODS[:4]:
                bad_text = b"\x12" if method == "Detokenize" else b"\x0a"
                for data in (b"\xff", b"\x0a\x05abc", bad_text + b"\x02\xc3\x28"):
                    error = await error_of(raw(harness, method, data))
                    assert error.code() is CODES.INTERNAL
                    assert "are not a jaxinfer.v1." in error.details()
            await harness.stub.Complete(make_request())

    run(main())


def test_unknown_method_is_unimplemented(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            error = await error_of(raw(harness, "Train", b""))
            assert error.code() is CODES.UNIMPLEMENTED

    run(main())


def test_message_beyond_the_size_limit_is_refused(engine):
    async def main():
        async with grpc_harness(engine, config(max_body_bytes=10_000)) as harness:
            for method in METHODS[:4]:
                error = await error_of(raw(harness, method, b"\x00" * 10_001))
                assert error.code() is CODES.RESOURCE_EXHAUSTED
                assert "10001" in error.details() and "10000" in error.details()
            await harness.stub.Tokenize(pb.TokenizeRequest(text="x" * 9_990))

    run(main())


PIECES = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda text: pb.GenerateRequest(text=text).SerializeToString(), st.text(max_size=20)),
    st.builds(
        lambda n, k, ids: pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids), params=pb.SamplingParams(n=n, top_k=k, max_tokens=2)
        ).SerializeToString(),
        st.integers(-3, 200),
        st.integers(-(2**63), 2**63 - 1),
        st.lists(st.integers(-1, 400), max_size=5),
    ),
    st.builds(
        lambda value, name: pb.GenerateRequest(
            text="x", params=pb.SamplingParams(**{name: value}, max_tokens=1)
        ).SerializeToString(),
        st.floats(),
        st.sampled_from(["temperature", "top_p", "min_p", "repetition_penalty"]),
    ),
)


def test_random_bytes_never_break_the_server(engine, caplog):
    """Any bytes get a status that blames the client, and none reveals a defect."""
    allowed = {CODES.INVALID_ARGUMENT, CODES.NOT_FOUND, CODES.DEADLINE_EXCEEDED, CODES.INTERNAL}

    async def main():
        async with grpc_harness(engine, config(timeout_s=5.0)) as harness:

            async def send(method: str, data: bytes) -> None:
                try:
                    async for _ in raw(harness, method, data):
                        pass
                except grpc.aio.AioRpcError as error:
                    assert error.code() in allowed, error
                    is_malformed = "are not a jaxinfer" in (error.details() or "")
                    assert error.code() is not CODES.INTERNAL or is_malformed, error

            loop = asyncio.get_running_loop()

            @settings(max_examples=150, deadline=None, derandomize=True, database=None)
            @given(st.sampled_from(METHODS), st.lists(PIECES, max_size=3).map(b"".join))
            def check(method: str, data: bytes) -> None:
                asyncio.run_coroutine_threadsafe(send(method, data), loop).result(30)

            await asyncio.to_thread(check)
            assert (await harness.stub.Complete(make_request())).finished.usage.output_tokens == 8

    run(main())
    assert "defect" not in caplog.text


def raw(harness: GrpcHarness, method: str, data: bytes) -> grpc.aio.UnaryStreamCall:
    """Call with these bytes as the message; on the wire a unary response is a stream of one."""
    return harness.channel.unary_stream(f"/jaxinfer.v1.Inference/{method}")(data)
