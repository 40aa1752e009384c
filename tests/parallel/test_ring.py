"""Attention over sequences that are split over devices: equal to one device, balanced, lean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer.sharding.ring import PAIRS
from jaxinfer.sharding.rules import Layout
from jaxinfer.sharding.zigzag import MAX_UNSPLIT_TOKENS, TokenSplit
from tests.support.child_process import findings
from tests.support.paths import SUPPORT

SCRIPT = SUPPORT / "sequence_child.py"
RING = [f"ring of 2, {variant}" for variant in ("plain", "all", "quantized", "latents")]
RING += ["ring of 8, plain", "ring of 4, nothing cached"]
REPLICATED = ["replicated on 2, all", "replicated on 8, quantized"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of a process with eight devices (tests/support/sequence_child.py)."""
    return findings(SCRIPT, timeout_s=400)


@pytest.mark.parametrize("case", RING)
def test_ring_computes_and_stores_the_same_as_one_device(found, case):
    assert found[case] < 1e-6


@pytest.mark.parametrize("case", REPLICATED)
def test_replicated_queries_merge_attention_to_page_parts(found, case):
    assert found[case] < 1e-6


def test_layer_memory_is_proportional_to_tokens_per_device(found):
    """Compare the temporaries and arguments of a layer for n x 512 tokens on n devices.

    The compiler counts them. With 2 devices XLA inlines the loop, which has one iteration, and
    needs less.
    """
    sizes = {int(n): size for n, size in found["bytes"].items()}
    assert sizes[2] <= sizes[4] and sizes[8] <= 1.02 * sizes[4]
    assert sizes[4] < found["bytes of twice the tokens"] < 2 * sizes[4]


def test_step_memory_is_proportional_to_tokens_per_device(found):
    """Only the logprobs of prompts are gathered for all tokens, which is 0.3 MB here."""
    sizes = {int(n): size for n, size in found["bytes of a step"].items()}
    assert sizes[8] <= 1.1 * sizes[4]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("num_tokens", [4096, 5000])
def test_causal_work_of_a_long_prompt_is_balanced(count, num_tokens):
    """A token attends to itself and to all tokens before it."""
    split = TokenSplit(num_tokens, count, "seq")
    index = np.stack([np.asarray(split.indices(device)) for device in range(count)])
    assert index.shape == (count, split.num_local)
    assert sorted(index.reshape(-1))[:num_tokens] == list(range(num_tokens))
    pairs = np.where(index < num_tokens, index + 1, 0).sum(axis=1)
    assert pairs.max() <= 1.02 * pairs.mean()
    in_order = np.arange(count * split.num_local).reshape(count, -1) + 1
    assert in_order.sum(axis=1).max() > 1.4 * in_order.sum(axis=1).mean(), "consecutive tokens"


@pytest.mark.parametrize("count", [2, 8])
def test_each_iteration_has_two_blocks_of_work_on_every_device(count):
    """Count the pairs of blocks that are not masked completely.

    The first iteration, with the device's own keys, has three, two of which are half masked.
    """
    split = TokenSplit(2 * count, count, "seq")  # blocks of one token
    for i in range(count):
        for device in range(count):
            queries, keys = (split.starts(at) for at in (device, (device - i) % count))
            work = [bool(queries[a] >= keys[b]) for a, b in PAIRS]
            assert sum(work) == (3 if i == 0 else 2)
            assert not queries[0] >= keys[1], "the pair that is skipped"


def test_few_tokens_are_not_split():
    layout = Layout.of({"seq": 4})
    assert TokenSplit.of(layout, MAX_UNSPLIT_TOKENS).count == 1
    assert TokenSplit.of(layout, MAX_UNSPLIT_TOKENS + 1) == TokenSplit(
        MAX_UNSPLIT_TOKENS + 1, 4, "seq"
    )
    assert TokenSplit.of(Layout.of({"tensor": 4}), 4096).count == 1
    assert TokenSplit.of(layout, 1001).block_len * 8 >= 1001, "padded at the end"
