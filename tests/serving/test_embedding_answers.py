"""Serialization of embeddings: exact, and without blocking the event loop."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.request import FinishReason
from jaxinfer.serving import generation, grpc_messages
from jaxinfer.serving.generation import Delta, Embeddings
from jaxinfer.serving.http import embeddings
from jaxinfer.serving.http.embeddings import serialize_embeddings
from tests.support.grpc_harness import run
from tests.support.protocol_harness import both_protocols
from tests.support.tiny_encoder import tiny_embedder


@pytest.mark.parametrize(
    "write",
    [
        lambda made: json.loads(serialize_embeddings("tiny", made, as_bytes=False))["data"],
        lambda made: grpc_messages.embeddings(made).embeddings,
    ],
    ids=["json", "protobuf"],
)
def test_large_embeddings_are_serialized_exactly_vector_by_vector(write):
    numbers = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    numbers[0, :6] = (0, -0.0, 1, 1e-40, np.finfo(np.float32).max, np.finfo(np.float32).tiny)
    rows = write(Embeddings(numbers, [3, 4, 5]))
    found = [row["embedding"] if isinstance(row, dict) else row.values for row in rows]
    assert np.array_equal(np.array(found, np.float32), numbers)


def longest_call(function: Callable[[], object]) -> float:
    """The longest time between two calls that `function` makes, as a part of all of its time: for
    so long the event loop's thread might have to wait. Of the processor, so that it is the same on
    a busy machine."""
    longest = 0.0

    def note(*event: object) -> None:
        nonlocal longest, last
        now = time.thread_time()
        longest, last = max(longest, now - last), now

    started = last = time.thread_time()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return longest / (time.thread_time() - started)


@pytest.mark.parametrize(
    "write",
    [lambda made: serialize_embeddings("tiny", made, as_bytes=False), grpc_messages.embeddings],
)
def test_large_embeddings_do_not_block_the_event_loop(write):
    vectors = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    made = Embeddings(vectors, [3] * len(vectors))
    assert made.is_large  # so that a thread writes it
    assert longest_call(lambda: write(made)) < 0.3
    assert longest_call(lambda: json.dumps(vectors.tolist())) > 0.6  # at once


def test_vector_with_nan_is_not_serialized():
    with pytest.raises(ValueError, match="NaN"):
        serialize_embeddings(
            "tiny", Embeddings(np.full((1, 2), np.nan, np.float32), [1]), as_bytes=False
        )


def test_large_embeddings_are_serialized_in_another_thread(monkeypatch):
    threads = []

    def watched(write):
        def watch(*args):
            threads.append(threading.current_thread())
            return write(*args)

        return watch

    monkeypatch.setattr(generation, "LARGE_ARRAY", 40)  # a vector has 32
    monkeypatch.setattr(embeddings, "serialize_embeddings", watched(serialize_embeddings))
    monkeypatch.setattr(grpc_messages, "embeddings", watched(grpc_messages.embeddings))

    async def main():
        async with both_protocols(tiny_embedder()) as both:
            callers: Any = both.callers
            http, grpc = callers["http"], callers["grpc"]
            for texts in (["a"], ["a", "b"]):
                body = {"input": texts}
                reply = await http.client.post("/v1/embeddings", json=body)
                assert len(reply.json()["data"]) == len(texts)
                assert len((await grpc.client.embed(texts)).vectors) == len(texts)

    run(main())
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False, False]


def test_joined_deltas_keep_the_embedding():
    vector = np.ones(3, np.float32)
    last = Delta(0, "", [], [], FinishReason.STOP, vector)
    assert Delta.joined([Delta(0, "", [], [], None), last]).embedding is vector
