"""Sequences split over devices: attention of a layer is what one device computes, balanced, and in
memory that follows a device's own tokens."""

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
TOGETHER = ["together on 2, all", "together on 8, quantized"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process with eight devices found; see tests/support/sequence_child.py."""
    return findings(SCRIPT, timeout_s=400)


@pytest.mark.parametrize("case", RING)
def test_a_ring_computes_and_stores_what_one_device_does(found, case):
    assert found[case] < 1e-6


@pytest.mark.parametrize("case", TOGETHER)
def test_devices_with_all_tokens_merge_their_cells(found, case):
    assert found[case] < 1e-6


def test_memory_of_a_device_follows_its_own_tokens(found):
    """Temporaries and arguments of a layer, as the compiler counts them: of n x 512 tokens on n
    devices. (XLA inlines the loop of 2 devices, which has one turn, and needs less.)"""
    of_ring = {int(n): size for n, size in found["bytes"].items()}
    assert of_ring[2] <= of_ring[4] and of_ring[8] <= 1.02 * of_ring[4]
    assert of_ring[4] < found["bytes of twice the tokens"] < 2 * of_ring[4]


def test_memory_of_a_whole_step_does_too(found):
    """Nothing that all tokens come to is gathered, but for the logprobs of prompts: 0.3 MB here."""
    of_step = {int(n): size for n, size in found["bytes of a step"].items()}
    assert of_step[8] <= 1.1 * of_step[4]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("num_tokens", [4096, 5000])
def test_causal_work_of_a_long_prompt_is_balanced(count, num_tokens):
    """A token sees those before it and itself."""
    split = TokenSplit(num_tokens, count, "seq")
    index = np.stack([np.asarray(split.indices(device)) for device in range(count)])
    assert index.shape == (count, split.num_local)
    assert sorted(index.reshape(-1))[:num_tokens] == list(range(num_tokens))
    pairs = np.where(index < num_tokens, index + 1, 0).sum(axis=1)
    assert pairs.max() <= 1.02 * pairs.mean()
    in_order = np.arange(count * split.num_local).reshape(count, -1) + 1
    assert in_order.sum(axis=1).max() > 1.4 * in_order.sum(axis=1).mean(), "as they would lie"


@pytest.mark.parametrize("count", [2, 8])
def test_each_turn_is_two_blocks_of_work_on_every_device(count):
    """By the pairs of blocks that see something at all; the first turn, with one's own, has three,
    two of them half."""
    split = TokenSplit(2 * count, count, "seq")  # blocks of one token
    for turn in range(count):
        for device in range(count):
            queries, keys = (split.starts(at) for at in (device, (device - turn) % count))
            work = [bool(queries[a] >= keys[b]) for a, b in PAIRS]
            assert sum(work) == (3 if turn == 0 else 2)
            assert not queries[0] >= keys[1], "the pair that is left out"


def test_few_tokens_are_not_split():
    layout = Layout.of({"seq": 4})
    assert TokenSplit.of(layout, MAX_UNSPLIT_TOKENS).count == 1
    assert TokenSplit.of(layout, MAX_UNSPLIT_TOKENS + 1) == TokenSplit(
        MAX_UNSPLIT_TOKENS + 1, 4, "seq"
    )
    assert TokenSplit.of(Layout.of({"tensor": 4}), 4096).count == 1
    assert TokenSplit.of(layout, 1001).block_len * 8 >= 1001, "padded behind"
