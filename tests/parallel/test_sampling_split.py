"""Sampling from logits with a sharded vocabulary has the same bits as on one device.

The comparison runs in tests/support/split_sampling_child.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.draw import NUM_CANDIDATES, NUM_LIMBS
from jaxinfer.sampling.vocabulary import columns_of, global_ids, vocab_size
from tests.support.child_process import findings
from tests.support.paths import SUPPORT
from tests.support.sampling_batch import R

CHILD = SUPPORT / "split_sampling_child.py"
SPLITS = {"2": 2, "4 over two axes": 4, "8": 8}  # the number of shards by name
CASES = [
    "greedy",
    "greedy logprobs",
    "random",
    "extras",
    "padding rows full of NaN",
    "rows not sampled",
    "prompt logprobs",
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of a process with eight devices."""
    return findings(CHILD, JAX_NUM_CPU_DEVICES="8")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", SPLITS)
def test_sharded_sampling_equals_one_device_on_every_device(split, case, found):
    assert found["splits"][split]["differs"][case] == []  # numbers of the results that differ


def test_sharded_sampling_supports_two_tokens_per_device(found):
    assert found["splits"]["8"]["differs"]["few tokens"] == []


@pytest.mark.parametrize("split", SPLITS)
def test_collectives_exchange_candidates_and_sums_but_no_logits(split, found):
    """A gather has two numbers per candidate, row and shard; a sum has limbs, never V columns."""
    limits = {
        "all-gather": 2 * R * NUM_CANDIDATES * SPLITS[split],
        "all-reduce": R * NUM_LIMBS,
    }
    for exchanged in found["splits"][split]["collectives"]:
        assert exchanged, "the devices exchange nothing"
        for name, dims in exchanged:
            assert found["vocab_size"] not in dims
            assert np.prod(dims) <= limits[name], f"{name} {dims}"


@pytest.mark.parametrize("split", SPLITS)
def test_number_of_collectives_is_bounded(split, found):
    """Count the collectives of all branches.

    Greedy decoding has 1 with extras and 1 without, rules that contradict each other 1, a draw 3,
    truncation 4 (the candidates, the weight that top_k keeps, one per round of each search), and
    logprobs 4. XLA may combine independent ones.
    """
    sampling, prompt_logprobs = found["splits"][split]["collectives"]
    assert len(sampling) <= 14 and len(prompt_logprobs) <= 4


def test_greedy_step_has_one_gather_of_8_bytes_per_row_and_shard(found):
    assert found["greedy"] == [["all-gather", [SPLITS["2"], 2, R]]]


def test_one_device_uses_no_collective(found):
    assert found["one"] == []
    x = jnp.zeros((2, 5))
    ids = jnp.asarray([0, 4, 7])
    assert vocab_size(x, ()) == 5
    assert global_ids(ids, x, ()) is ids and columns_of(ids, x, ()) is ids
