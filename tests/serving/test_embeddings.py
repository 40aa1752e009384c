"""`/v1/embeddings` and gRPC's `Embed`: the same vectors as `LLM.embed`, the same refusals."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import openai
import pytest

from jaxinfer.embedding.sentences import encode_text, finalize_vectors
from jaxinfer.serving import AsyncClient, Client, RpcError
from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.errors import ServiceError
from jaxinfer.serving.generation import EmbeddingRequest
from tests.support.grpc_harness import run
from tests.support.paths import ROOT
from tests.support.protocol_harness import GREEDY, BothProtocols, both_protocols
from tests.support.tiny_encoder import DIM, MAX_LEN, checkpoint, tiny_embedder
from tests.support.tiny_server import Brake, tiny_engine

TEXTS = ["the cat sat on the mat", "a dog!", "query: cat"]
LONG = "the cat " * 40


@pytest.fixture(scope="module")
def embedder():
    return tiny_embedder()


@pytest.fixture
def brake(embedder):
    brake = Brake(embedder)
    yield brake
    brake.release()
    del embedder.step  # the class's own again


def vectors_of(embedder, texts, **named) -> np.ndarray:
    ids = [encode_text(embedder, text, truncate=True) for text in texts]
    return finalize_vectors(embedder, embedder.embed(ids), **named)


def http_of(both: BothProtocols) -> Any:
    return both.callers["http"].client  # type: ignore[attr-defined]


def grpc_of(both: BothProtocols) -> AsyncClient:
    return both.callers["grpc"].client  # type: ignore[attr-defined]


async def post(both: BothProtocols, **body: Any) -> Any:
    return await http_of(both).post("/v1/embeddings", json=body)


async def refused(both: BothProtocols, protocol: str, **fields: Any) -> tuple[str, str | None]:
    """The kind, by the protocol's name, and the field of a refused request."""
    if protocol == "http":
        reply = await post(both, **fields)
        assert reply.status_code != 200, reply.text
        error = reply.json()["error"]
        return error["type"], error["param"]
    with pytest.raises(RpcError) as caught:
        await grpc_of(both).embed(fields.pop("input"), **fields)
    return caught.value.code.name, caught.value.field


def test_embeddings_equal_the_librarys_over_both_protocols(embedder):
    wanted = vectors_of(embedder, TEXTS)
    ids = [encode_text(embedder, text) for text in TEXTS]

    async def main():
        async with both_protocols(embedder) as both:
            for texts in (TEXTS, ids):
                reply = (await post(both, input=texts)).json()
                found = np.array([item["embedding"] for item in reply["data"]], np.float32)
                assert np.abs(found - wanted).max() < 1e-5
                assert [item["index"] for item in reply["data"]] == [0, 1, 2]
                num_tokens = sum(map(len, ids))
                assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
                made = await grpc_of(both).embed(texts)
                assert np.abs(made.vectors - wanted).max() < 1e-5
                assert made.num_tokens == [len(each) for each in ids]
            for one in (TEXTS[0], ids[0]):
                reply = (await post(both, input=one)).json()
                [item] = reply["data"]
                assert np.abs(np.array(item["embedding"]) - wanted[0]).max() < 1e-5
            assert (await grpc_of(both).embed(TEXTS[0])).vectors.shape == (1, DIM)

    run(main())


def test_embedding_fields_are_honoured_over_both_protocols(embedder):
    fields: list[dict[str, Any]] = [
        {"normalize": False},
        {"dimensions": 5},
        {"dimensions": 5, "normalize": False},
        {"truncate": True, "input": [LONG]},
        {"prompt_name": "query", "input": ["cat"]},
        {"prompt_name": "document", "user": "ada", "request_id": "mine", "timeout_s": 50.0},
    ]

    all_wanted = []
    for field in fields:
        texts = field.get("input", TEXTS)
        texts = ["query: cat"] if field.get("prompt_name") == "query" else texts
        named = {name: field.get(name) for name in ("normalize", "dimensions")}
        all_wanted.append(vectors_of(embedder, texts, **named))

    async def main():
        async with both_protocols(embedder) as both:
            for field, wanted in zip(fields, all_wanted, strict=True):
                body: dict[str, Any] = {"input": TEXTS} | field
                reply = (await post(both, **body)).json()
                found = np.array([item["embedding"] for item in reply["data"]], np.float32)
                assert found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-5
                made = await grpc_of(both).embed(body.pop("input"), **body)
                assert np.abs(made.vectors - wanted).max() < 1e-5

    run(main())


def test_openai_client_gets_float32_in_base64_and_as_numbers(embedder):
    wanted = vectors_of(embedder, TEXTS)

    async def main():
        async with both_protocols(embedder) as both:
            url = str(http_of(both).base_url).rstrip("/") + "/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                create = client.embeddings.create
                by_default = await create(model="tiny", input=TEXTS)  # base64, decoded by it
                assert (
                    np.abs(np.array([d.embedding for d in by_default.data]) - wanted).max() < 1e-6
                )
                floats = await create(model="tiny", input=TEXTS, encoding_format="float")
                assert np.abs(np.array([d.embedding for d in floats.data]) - wanted).max() < 1e-6
                short = await create(model="tiny", input=TEXTS[0], dimensions=4)
                assert len(short.data[0].embedding) == 4 and short.usage.prompt_tokens == 8
                extra = {"truncate": True}
                await create(model="tiny", input=LONG, extra_body=extra)
                with pytest.raises(openai.BadRequestError, match="set truncate"):
                    await create(model="tiny", input=LONG)
            reply = (await post(both, input="a", encoding_format="base64")).json()
            data = base64.b64decode(reply["data"][0]["embedding"])
            assert np.frombuffer(data, "<f4").shape == (DIM,)

    run(main())


INVALID = ("invalid_request_error", "INVALID_ARGUMENT")
REFUSALS: list[tuple[dict[str, Any], tuple[str, str], str | None]] = [
    ({"input": [LONG]}, INVALID, "input"),
    ({"input": ["a", [5] * (MAX_LEN + 1)]}, INVALID, "input"),
    ({"input": [[10**6]]}, INVALID, "input"),
    ({"input": []}, INVALID, "input"),
    ({"input": ["a", ""]}, INVALID, "input"),
    ({"dimensions": DIM + 1}, INVALID, "dimensions"),
    ({"dimensions": 0}, INVALID, "dimensions"),
    ({"prompt_name": "passage"}, INVALID, "prompt_name"),
    ({"prompt_name": "query", "input": [[5]]}, INVALID, "prompt_name"),
    ({"model": "another"}, ("not_found_error", "NOT_FOUND"), "model"),
]


def test_embedding_refusals_name_the_field_over_both_protocols(embedder):
    async def main():
        async with both_protocols(embedder) as both:
            for fields, (openai_type, status), field in REFUSALS:
                fields = {"input": ["a"]} | fields
                for protocol, kind in (("http", openai_type), ("grpc", status)):
                    said = await refused(both, protocol, **fields)
                    assert said == (kind, field), (fields, protocol)
            wrong: list[dict[str, Any]] = [
                {"input": ["a", [5]]},
                {"input": 5},
                {"input": "a", "encoding_format": "int8"},
                {"input": "a", "surprise": 1},
                {"input": "a", "dimensions": "4"},
                {"input": "a", "timeout_s": 10**6},
                {},
            ]
            for body in wrong:
                assert (await refused(both, "http", **body))[0] == INVALID[0]
            assert both.service.loop.num_streams == 0

    run(main())


def test_bad_input_does_not_affect_other_requests(embedder):
    wanted = vectors_of(embedder, TEXTS)

    async def main():
        async with both_protocols(embedder) as both:

            async def good() -> None:
                made = await grpc_of(both).embed(TEXTS)
                assert np.abs(made.vectors - wanted).max() < 1e-5

            async def bad() -> None:
                assert (await refused(both, "http", input=["a", LONG]))[1] == "input"

            await asyncio.gather(*(call() for _ in range(8) for call in (good, bad)))

    run(main())


def test_unsupported_operation_of_a_model_is_refused(embedder):
    async def main():
        async with both_protocols(embedder) as both:
            for path, body in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                reply = await http_of(both).post(path, json=body)
                error = reply.json()["error"]
                assert reply.status_code == 400 and error["type"] == "wrong_model_error"
                assert "encoder" in error["message"]
            with pytest.raises(RpcError, match=r"FAILED_PRECONDITION.*encoder"):
                await grpc_of(both).complete("a")
            with pytest.raises(RpcError, match=r"FAILED_PRECONDITION.*encoder"):
                async for _ in grpc_of(both).generate("a"):
                    pass
        engine, _ = tiny_engine()
        async with both_protocols(engine) as both:
            assert (await refused(both, "http", input="a"))[0] == "wrong_model_error"
            assert (await refused(both, "grpc", input="a"))[0] == "FAILED_PRECONDITION"
            await both.callers["http"].whole("a", max_tokens=1, **GREEDY)

    run(main())


def test_disconnected_client_cancels_its_embeddings(embedder, brake):
    async def main():
        async with both_protocols(embedder) as both:
            brake.hold()
            first = asyncio.create_task(post(both, input=TEXTS))
            second = asyncio.create_task(grpc_of(both).embed(TEXTS))
            while both.service.loop.num_streams < 6:
                await asyncio.sleep(0.005)
            first.cancel()
            second.cancel()
            while both.service.loop.num_streams:
                await asyncio.sleep(0.005)
            brake.release()
            await both.idle()
            await asyncio.wait((first, second))

    run(main())


def test_embedding_deadline_and_full_queue_are_refused(embedder, brake):
    async def main():
        async with both_protocols(embedder, max_waiting_texts=2) as both:
            too_many = {"input": ["a"] * 7}  # max_num_seqs is 4
            assert await refused(both, "http", **too_many) == (INVALID[0], "input")
            said = (await post(both, **too_many)).json()["error"]["message"]
            assert said == "the request has 7 texts; this server takes 6 at once"
            brake.hold()
            waiting = asyncio.create_task(grpc_of(both).embed(["a"] * 4))
            while both.service.loop.num_streams < 4:
                await asyncio.sleep(0.005)
            reply = await post(both, input=["a"] * 3)
            assert reply.status_code == 429 and reply.headers["retry-after"]
            assert "max_waiting_texts" in reply.json()["error"]["message"]
            assert "4 texts are unfinished" in reply.json()["error"]["message"]
            assert (await refused(both, "grpc", input=["a"] * 3))[0] == "RESOURCE_EXHAUSTED"
            for protocol, kind in (("http", "timeout_error"), ("grpc", "DEADLINE_EXCEEDED")):
                assert (await refused(both, protocol, input="a", timeout_s=0.3))[0] == kind
            while both.service.loop.num_streams > 4:  # the client's own deadline fired first
                await asyncio.sleep(0.005)
            text = (await http_of(both).get("/metrics")).text
            for protocol in ("http", "grpc"):  # counted once, as accepted requests
                ends = "deadline" if protocol == "http" else "deadline|cancelled"
                assert re.search(
                    f'requests_total{{outcome="({ends})",protocol="{protocol}"}} 1.0', text
                )
                assert (
                    f'requests_refused_total{{kind="deadline",protocol="{protocol}"}}' not in text
                )
                assert (
                    f'requests_refused_total{{kind="overloaded",protocol="{protocol}"}} 1.0' in text
                )
            brake.release()
            assert (await waiting).vectors.shape == (4, DIM)

    run(main())


def test_inputs_beyond_the_token_limit_are_invalid_not_retryable(embedder):
    async def main():
        async with both_protocols(embedder, max_waiting_tokens=9) as both:
            for protocol, kind in (("http", INVALID[0]), ("grpc", INVALID[1])):
                assert await refused(both, protocol, input=["the cat"] * 3) == (kind, "input")
            reply = await post(both, input=["the cat"] * 3)
            assert "12 tokens together" in reply.json()["error"]["message"]
            assert (await post(both, input=["the cat"] * 2)).status_code == 200
            assert (
                await post(both, input="the cat " * 10)
            ).status_code == 200  # one alone is taken

    run(main())


def test_submitting_many_short_texts_yields_to_the_event_loop(embedder, brake, monkeypatch):
    encode, threads, turns = embedder.tokenizer.encode, set(), []

    def watched(text, **kwargs):
        threads.add(threading.current_thread())
        return encode(text, **kwargs)

    async def main():
        async with both_protocols(
            embedder, max_waiting_texts=130
        ) as both:  # 134 with those that run
            loop, has_ended = both.service.loop, False

            async def others() -> None:
                while not has_ended:
                    turns.append(loop.num_streams)
                    if 0 < turns[-1] < 134:  # the capacity of the remaining texts is reserved
                        with pytest.raises(ServiceError, match="134 texts are unfinished"):
                            loop.check_capacity()
                    await asyncio.sleep(0)

            brake.hold()
            monkeypatch.setattr(embedder.tokenizer, "encode", watched)
            asked = asyncio.create_task(both.service.embed(EmbeddingRequest(["a"] * 134)))
            watching = asyncio.create_task(others())
            while loop.num_streams < 134:
                await asyncio.sleep(0.001)
            has_ended = True
            await watching
            brake.release()
            assert (await asked).vectors.shape == (134, DIM)
            loop.check_capacity(134)  # all capacity is released

    run(main())
    assert threading.main_thread() not in threads and len(threads) == 1
    assert {64, 128} <= set(turns)


def test_encoder_server_has_keys_metrics_and_model_info(embedder):
    async def main():
        keys = ApiKeys([("ada", "secret-key")])
        async with both_protocols(embedder, keys=keys) as both:
            assert (await refused(both, "http", input="a"))[0] == "authentication_error"
            assert (await refused(both, "grpc", input="a"))[0] == "UNAUTHENTICATED"
        async with both_protocols(embedder, keys=keys, key="secret-key") as both:
            await post(both, input=TEXTS)
            await grpc_of(both).embed(TEXTS)
            model = (await http_of(both).get("/v1/models")).json()["data"][0]
            assert model["embedding_dim"] == (await grpc_of(both).model()).embedding_dim == DIM
            assert (await grpc_of(both).stats()).num_generated == 0
            text = (await http_of(both).get("/metrics")).text
            assert 'jaxinfer_requests_total{outcome="stop",protocol="http"} 3.0' in text
            assert 'jaxinfer_requests_total{outcome="stop",protocol="grpc"} 3.0' in text
            document = (await http_of(both).get("/openapi.json")).json()
            assert "/v1/embeddings" in document["paths"]
            assert "/v1/completions" not in document["paths"]
            assert (await http_of(both).get("/")).status_code == 404  # there is nobody to chat with

    run(main())


def test_process_serves_an_encoder_directory(embedder, tmp_path):
    wanted = vectors_of(embedder, TEXTS)
    command = [sys.executable, "scripts/serve.py", f"--model={checkpoint()}", "--http_port=0"]
    command += ["--grpc_port=0", "--set=bucket_growth=3", "--set=scheduler.max_num_seqs=1"]
    log = tmp_path / "log"
    started = {"stdout": subprocess.PIPE, "cwd": ROOT, "text": True}
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, **started) as server:
        try:
            assert server.stdout is not None
            about = json.loads(server.stdout.readline())
            with Client(about["grpc"]) as client:
                assert np.abs(client.embed(TEXTS).vectors - wanted).max() < 1e-5
                assert client.health()
            with contextlib.closing(
                openai.OpenAI(base_url=about["http"] + "/v1", api_key="none")
            ) as http:
                data = http.embeddings.create(model=about["model"], input=TEXTS).data
                assert np.abs(np.array([d.embedding for d in data]) - wanted).max() < 1e-5
            server.terminate()
            assert server.wait(30) == 0
            assert "tiny: 24,352 parameters, 0.1 MB, 4.00 bytes each; computed as float32" in (
                log.read_text()
            )
        finally:
            server.kill()
