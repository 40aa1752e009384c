"""Batching of texts and the shapes of their batches."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import ConfigError, SchedulerConfig
from jaxinfer.config import EngineConfig, from_mapping
from jaxinfer.embedding.text_batches import (
    TextBucket,
    WaitingTexts,
    buckets_for,
    check_encoder_config,
)
from jaxinfer.engine.request import FinishReason, Rank, Request
from jaxinfer.sampling.params import SamplingParams


def request(arrival: int, length: int) -> Request:
    ids, params = [0] * length, SamplingParams()
    return Request(f"{arrival}", ids, params, max_len=length, rank=Rank(arrival=arrival))


def test_default_buckets():
    by_length: dict[int, list[int]] = {}
    for bucket in buckets_for(EngineConfig(), 512):
        by_length.setdefault(bucket.length, []).append(bucket.rows)
    assert by_length == {
        16: [1, 8, 32],
        32: [1, 8, 16],
        64: [1, 8],
        128: [1, 4],
        256: [1, 2],
        512: [1],
    }


@given(
    st.integers(1, 9000),
    st.integers(1, 5000),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(2, 9),
)
def test_every_text_fits_a_bucket_and_every_bucket_fits_the_budget(
    max_len, max_tokens, max_num_seqs, min_bucket, growth
):
    scheduler = SchedulerConfig(max_num_batched_tokens=max_tokens, max_num_seqs=max_num_seqs)
    config = EngineConfig(
        scheduler=scheduler, min_bucket=min(min_bucket, max_tokens), bucket_growth=growth
    )
    buckets = buckets_for(config, max_len)
    assert buckets == tuple(dict.fromkeys(buckets)) and buckets[-1].length == max_len
    for bucket in buckets:
        assert bucket.rows <= max_num_seqs and bucket.length <= max_len
        assert bucket.rows == 1 or bucket.rows * bucket.length <= max_tokens
    lengths = sorted({bucket.length for bucket in buckets})
    assert all(TextBucket(1, length) in buckets for length in lengths)
    assert all(b <= growth * a for a, b in itertools.pairwise(lengths))


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=60))
def test_every_text_is_taken_once_and_the_oldest_is_in_the_next_batch(texts):
    config = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=5))
    waiting = WaitingTexts(buckets_for(config, 64))
    requests = [request(i, length) for i, (length, _) in enumerate(texts)]
    for each in requests:
        waiting.add(each)
    for each, (_, is_aborted) in zip(requests, texts, strict=True):
        if is_aborted:
            each.finish_reason = FinishReason.ABORT
    left = [each for each in requests if not each.is_finished]
    while (batch := waiting.take()) is not None:
        assert left[0] in batch.requests and len(batch.requests) <= batch.bucket.rows
        assert all(each.prompt_len <= batch.bucket.length for each in batch.requests)
        assert batch.num_tokens == sum(each.prompt_len for each in batch.requests)
        left = [each for each in left if each not in batch.requests]
    assert not left


def test_rows_that_would_be_padding_go_to_shorter_texts():
    config = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8))
    waiting = WaitingTexts(buckets_for(config, 32))
    for arrival, length in enumerate([30, 31, 5, 32, 6]):
        waiting.add(request(arrival, length))
    batch = waiting.take()
    assert batch is not None and batch.bucket == (8, 32)
    assert [each.rank.arrival for each in batch.requests] == [0, 1, 3, 2, 4]
    waiting.put_back(batch.requests)
    assert waiting.take() == batch


@pytest.mark.parametrize(
    "options",
    [
        {"cache": {"page_size": 8}},
        {"seed": 1},
        {"batch_invariant": True},
        {"check_every_step": True},
        {"mesh": {"tensor": 4}},
        {"mesh": {"all_reduce": "int8"}},
        {"scheduler": {"policy": "priority"}},
    ],
)
def test_generation_options_are_refused_by_name(options):
    [name] = options
    with pytest.raises(ConfigError, match=name):
        check_encoder_config(from_mapping(options))


def test_encoder_with_random_weights_accepts_a_seed():
    check_encoder_config(from_mapping({"seed": 1, "load_format": "random"}))
