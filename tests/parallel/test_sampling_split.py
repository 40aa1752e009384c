"""Sampling from logits that are split over the vocabulary has the bits of one device.

What is compared, and how, is in tests/support/split_sampling_child.py.
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
SPLITS = {"2": 2, "4 over two axes": 4, "8": 8}  # name: parts
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
    """What a process with eight devices found."""
    return findings(CHILD, JAX_NUM_CPU_DEVICES="8")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", SPLITS)
def test_parts_choose_count_and_report_what_one_device_does_on_every_device(split, case, found):
    assert found["splits"][split]["differs"][case] == []  # results, by number, that differ


def test_a_vocabulary_of_two_tokens_a_device_is_sampled_alike(found):
    assert found["splits"]["8"]["differs"]["few tokens"] == []


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_exchanged_is_of_the_size_of_the_answer(split, found):
    """A gather has two numbers a candidate, row and part; a sum is of limbs; never V columns."""
    limits = {
        "all-gather": 2 * R * NUM_CANDIDATES * SPLITS[split],
        "all-reduce": R * NUM_LIMBS,
    }
    for exchanged in found["splits"][split]["collectives"]:
        assert exchanged, "the parts say nothing to each other"
        for name, dims in exchanged:
            assert found["vocab_size"] not in dims
            assert np.prod(dims) <= limits[name], f"{name} {dims}"


@pytest.mark.parametrize("split", SPLITS)
def test_collectives_are_counted(split, found):
    """Of all branches: greedy 1 with extras and 1 without, rules that contradict each other 1, a
    draw 3, truncation 4 (candidates, the weight of what top_k kept, one a round of each search),
    logprobs 4. Fewer where XLA joins two that are independent."""
    sampling, prompt_logprobs = found["splits"][split]["collectives"]
    assert len(sampling) <= 14 and len(prompt_logprobs) <= 4


def test_a_greedy_step_costs_one_gather_of_8_bytes_a_row_and_part(found):
    assert found["greedy"] == [["all-gather", [SPLITS["2"], 2, R]]]


def test_one_device_has_no_collective(found):
    assert found["one"] == []
    x = jnp.zeros((2, 5))
    ids = jnp.asarray([0, 4, 7])
    assert vocab_size(x, ()) == 5
    assert global_ids(ids, x, ()) is ids and columns_of(ids, x, ()) is ids
