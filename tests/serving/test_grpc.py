"""The gRPC server over a real socket: streamed and complete output are the same."""

from __future__ import annotations

import grpc
import pytest

from jaxinfer import Engine, SamplingParams
from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.serving.generation import Chat, GenerationRequest
from jaxinfer.serving.observer import Observer
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from tests.support.grpc_harness import grpc_harness, joined, make_request, run, streamed
from tests.support.tiny_server import tiny_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()[0]


def test_stream_begins_with_its_id_and_ends_with_usage_and_timing(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            parts = await streamed(harness, make_request(max_tokens=8, request_id="mine"))
            assert parts[0].started == pb.Started(request_id="mine", prompt_tokens=len("a prompt"))
            assert [part.HasField("sample") for part in parts] == [False] + [True] * (
                len(parts) - 1
            )
            assert [part.HasField("finished") for part in parts[:-1]] == [False] * (len(parts) - 1)
            usage, timing = parts[-1].finished.usage, parts[-1].finished.timing
            assert usage.output_tokens == 8 and usage.prompt_tokens == len("a prompt")
            assert 0 <= timing.queue_s <= timing.first_token_s <= timing.total_s
            reasons = [part.sample.finish_reason for part in parts[1:]]
            assert reasons == [0] * (len(parts) - 2) + [pb.FINISH_REASON_LENGTH]

    run(main())


def test_complete_returns_the_services_result(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            stream = await harness.service.generate(GenerationRequest("a prompt", params))
            [expected] = (await stream.collect()).samples
            answer = await harness.stub.Complete(make_request(max_tokens=12))
            [sample] = answer.samples
            assert sample.text == expected.text
            assert list(sample.token_ids) == expected.token_ids
            assert answer.finished.usage.output_tokens == 12 and answer.request_id

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_deltas_join_to_the_complete_output_with_split_characters(engine, seed):
    text = "né 汉字 🙂"

    async def main():
        async with grpc_harness(engine) as harness:
            ids = (await harness.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
            assert len(ids) > len(text), "a token a byte"
            named = {
                "temperature": 5.0,
                "seed": seed,
                "allowed_token_ids": pb.TokenIds(ids=sorted(set(ids))),
            }
            request = make_request(text, 120, params=named)
            [whole] = (await harness.stub.Complete(request)).samples
            parts = await streamed(harness, request)
            assert joined(parts) == [whole] and len(whole.token_ids) == 120
            assert any(ord(c) > 127 and c != "\ufffd" for c in whole.text)

    run(main())


@pytest.mark.parametrize("include", [False, True])
def test_deltas_join_to_the_complete_output_with_stop_strings(engine, include):
    async def main():
        async with grpc_harness(engine) as harness:
            params = {"temperature": 1.0, "seed": 3}
            [free] = (
                await harness.stub.Complete(make_request(max_tokens=80, params=params))
            ).samples
            for start, length in ((0, 1), (7, 3), (20, 5), (30, 8)):
                stop = free.text[start : start + length]
                params |= {
                    "stop": pb.Strings(values=["never there", stop]),
                    "include_stop_str_in_output": include,
                }
                request = make_request(max_tokens=80, params=params)
                [whole] = (await harness.stub.Complete(request)).samples
                assert joined(await streamed(harness, request)) == [whole]
                before = free.text[: free.text.index(stop)]
                assert whole.text == (before + stop if include else before)
                assert whole.finish_reason == pb.FINISH_REASON_STOP

    run(main())


def test_samples_and_logprobs_are_transmitted(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            params = {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 2, "prompt_logprobs": 1}
            request = make_request(max_tokens=6, params=params)
            answer = await harness.stub.Complete(request)
            parts = await streamed(harness, request)
            assert joined(parts) == list(answer.samples)
            assert [sample.index for sample in answer.samples] == [0, 1, 2]
            for sample in answer.samples:
                assert [item.token_id for item in sample.logprobs] == list(sample.token_ids)
                assert all(len(item.top) == 2 and item.logprob <= 0 for item in sample.logprobs)
            for end in (answer.finished, parts[-1].finished):
                first, *others = end.prompt_logprobs.tokens
                assert not first.HasField("logprob") and len(others) == len("a prompt") - 1
                assert all(item.HasField("logprob") and len(item.top) == 1 for item in others)
                assert end.usage.output_tokens == 18

    run(main())


def test_token_ids_text_and_chat_give_the_same_output(engine):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])

    async def main():
        async with grpc_harness(engine) as harness:
            ids = (await harness.stub.Tokenize(pb.TokenizeRequest(text="a prompt"))).token_ids
            given = await harness.stub.Complete(make_request(token_ids=pb.TokenIds(ids=ids)))
            assert given.samples == (await harness.stub.Complete(make_request("a prompt"))).samples

            ids = (await harness.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
            assert ids == await harness.service.tokenize(
                Chat([{"role": "user", "content": "hello"}])
            )
            given = await harness.stub.Complete(make_request(token_ids=pb.TokenIds(ids=ids)))
            assert given.samples == (await harness.stub.Complete(make_request(chat=chat))).samples

    run(main())


def test_tokenize_and_detokenize_round_trip(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            for text in ("", "né 汉字 🙂", "a" * 500):
                ids = (await harness.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
                bare = pb.TokenizeRequest(text=text, add_special_tokens=False)
                expected = await harness.service.tokenize(text, add_special_tokens=False)
                assert (await harness.stub.Tokenize(bare)).token_ids == expected
                answer = await harness.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
                assert answer.text.endswith(text)
            long = (await harness.stub.Tokenize(pb.TokenizeRequest(text="a" * 20_000))).token_ids
            with pytest.raises(grpc.aio.AioRpcError, match="the context holds 512"):
                await harness.stub.Detokenize(pb.DetokenizeRequest(token_ids=long))

    run(main())


def test_get_model_and_get_stats_return_the_services_values(engine):
    async def main():
        async with grpc_harness(engine) as harness:
            model = await harness.stub.GetModel(pb.GetModelRequest())
            assert model.name == "tiny" and model.max_len == engine.max_model_len
            assert model.has_chat_template and model.created > 0
            before = await harness.stub.GetStats(pb.GetStatsRequest())
            await harness.stub.Complete(make_request(max_tokens=8))
            stats = await harness.stub.GetStats(pb.GetStatsRequest())
            assert stats.num_generated == before.num_generated + 8
            assert stats.num_pages == engine.stats.num_pages

    run(main())


def test_unset_params_take_the_checkpoints_defaults(engine):
    seen: list[SamplingParams] = []
    observer = Observer(on_end=lambda stream: seen.append(stream.request.params))
    defaults = GenerationDefaults(temperature=0.25, top_k=7)

    async def main():
        async with grpc_harness(engine, generation=defaults, observers=(observer,)) as harness:
            await harness.stub.Complete(pb.GenerateRequest(text="x"))
            params = pb.SamplingParams(temperature=1.0, top_k=0, max_tokens=3)
            await harness.stub.Complete(pb.GenerateRequest(text="x", params=params))
            open_end = pb.SamplingParams(up_to_context=pb.UpToContext())
            await harness.stub.Complete(pb.GenerateRequest(text="x", params=open_end))

    run(main())
    assert [(p.temperature, p.top_k, p.max_tokens) for p in seen] == [
        (0.25, 7, 256),
        (1.0, 0, 3),
        (0.25, 7, None),
    ]


def test_request_fields_reach_the_engine(engine):
    seen: list[GenerationRequest] = []
    observer = Observer(on_end=lambda stream: seen.append(stream.request))

    async def main():
        async with grpc_harness(engine, observers=(observer,)) as harness:
            await harness.stub.Complete(make_request(cache_salt="s", user="ann", request_id="r"))
            await harness.stub.Complete(make_request())

    run(main())
    first, second = seen
    assert (first.cache_salt, first.user, first.request_id, first.protocol) == (
        "s",
        "ann",
        "r",
        "grpc",
    )
    assert (second.cache_salt, second.user, second.request_id) == ("", "", None)
