"""An engine that splits sequences over eight devices equals an engine on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer import EngineConfig
from jaxinfer.config import MeshConfig, SchedulerConfig
from jaxinfer.options import ConfigError
from jaxinfer.parallel.mesh_options import page_part_size
from jaxinfer.sharding.rules import Layout
from tests.support.child_process import findings
from tests.support.paths import SUPPORT

SCRIPT = SUPPORT / "sequence_engine_child.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of a process with eight devices (tests/support/sequence_engine_child.py)."""
    return findings(SCRIPT, timeout_s=500)


def test_tokens_of_split_sequences_equal_one_device(found):
    """A long prompt, then a mixed batch, greedy and sampled, with preemptions and a prefix hit."""
    one, eight = found["one"], found["eight"]
    assert one["preemptions"] > 0 and one["shared"] > 0
    assert eight["tokens"] == one["tokens"]
    assert eight["preemptions"] == one["preemptions"] and eight["shared"] == one["shared"]


def test_logprobs_of_a_split_prompt_equal_one_device(found):
    one, eight = (np.array(found[name]["logprobs"]) for name in ("one", "eight"))
    assert len(one) > 100 and np.abs(one - eight).max() < 1e-5


def test_prompt_of_eight_times_the_memory_runs_on_eight_devices(found):
    """Each device has as much memory as the single device of an engine that refuses the prompt."""
    assert "tokens" in found["refused"]
    allocated, allowed = found["bytes"]
    assert allocated == allowed


def test_page_size_that_does_not_divide_is_refused():
    assert page_part_size(64, Layout.of({"seq": 8})) == 8
    with pytest.raises(ConfigError, match=r"page_size is 12, which mesh\.seq 8 does not .* of 8"):
        page_part_size(12, Layout.of({"seq": 8}))


def test_batch_invariance_of_split_sequences_is_refused():
    with pytest.raises(ConfigError, match=r"batch_invariant is true and mesh\.seq 2"):
        EngineConfig(batch_invariant=True, mesh=MeshConfig(seq=2))


@pytest.mark.parametrize(("seq", "pipe", "num_buckets"), [(2, 1, 11), (1, 2, 11), (2, 2, 1)])
def test_pipeline_stages_of_split_sequences_use_one_bucket(seq, pipe, num_buckets):
    """A stage passes on activations as its step splits them, so all stages must split alike."""
    config = EngineConfig(
        mesh=MeshConfig(seq=seq, pipe=pipe), scheduler=SchedulerConfig(max_num_batched_tokens=1024)
    )
    assert len(config.buckets) == num_buckets and config.buckets[-1] == 1024
