"""Each feature of the engine gives the same results on a mesh as on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.child_process import findings
from tests.support.mesh_bench import VOCAB_SIZE
from tests.support.mesh_features_child import FEATURES, Feature
from tests.support.paths import SUPPORT

pytestmark = [pytest.mark.long, pytest.mark.ci, pytest.mark.once]

SCRIPT = SUPPORT / "mesh_features_child.py"
# Sums of shards differ by 2e-6; a feature missing on one side makes a difference of 5e-3 or more.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of a process with four devices (tests/support/mesh_features_child.py)."""
    return findings(SCRIPT)


@pytest.mark.parametrize("name", FEATURES)
def test_tokens_and_logprobs_on_a_mesh_equal_one_device(found, name):
    one, mesh = found[name]["one"], found[name]["mesh"]
    for work in ("together", "alone"):
        assert mesh[work]["tokens"] == one[work]["tokens"]
        ids, logprobs = zip(*mesh[work]["logprobs"], strict=True)
        expected_ids, expected = zip(*one[work]["logprobs"], strict=True)
        assert ids == expected_ids
        assert np.abs(np.subtract(logprobs, expected)).max() < CLOSE


@pytest.mark.parametrize("name", FEATURES)
def test_feature_is_active(found, name):
    """Otherwise two engines without the feature would be compared."""
    feature: Feature = FEATURES[name]
    for devices in ("one", "mesh"):
        run = found[name][devices]
        mesh = feature.mesh if devices == "mesh" else {}
        assert bool(run["calls"]["shift"]) == (mesh.get("seq", 1) > 1)
        assert bool(run["calls"]["overlapped_product"]) == mesh.get("overlap", False)
        assert bool(run["num_quantized"]) == ("quantize" in feature.options)
        assert run["num_quantized"] == found[name]["one"]["num_quantized"]
        assert run["cache"] == feature.options.get("cache", {}).get("dtype", "float32")
        parts = 1 if "whole" in mesh else mesh.get("expert", 1) * mesh.get("tensor", 1)
        assert run["rows_of_table"] == VOCAB_SIZE // parts


def test_batch_invariant_bits_are_independent_of_the_batch(found):
    mesh = found["batch_invariant"]["mesh"]
    alone = mesh["alone"]["logprobs"]
    assert mesh["together"]["logprobs"][: len(alone)] == alone
    assert mesh["together"]["tokens"][0] == mesh["alone"]["tokens"][0]
