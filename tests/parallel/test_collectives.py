"""Exact, compressed and overlapped sums over devices, and the number of sums per layer.

A process with eight CPU devices computes the results (tests/support/collectives_child.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.sharding.mesh import MeshError
from jaxinfer.sharding.rules import Layout
from tests.support.child_process import findings
from tests.support.paths import SUPPORT

SCRIPT = SUPPORT / "collectives_child.py"
CASES = ["2", "4", "8", "bfloat16", "padded"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of a process with eight devices."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return findings(SCRIPT, timeout_s=240, **flags)


@pytest.mark.parametrize("case", CASES)
def test_compressed_sum_is_equal_on_all_devices_and_within_its_bound(found, case):
    one = found["compressed_sums"][case]
    assert one["is_same"]
    rounding = 0.5 if case == "bfloat16" else 0  # the result is rounded to 8 bits
    assert 0 < one["share_of_bound"] <= 1 + rounding


@pytest.mark.parametrize("case", ["2", "4", "8"])
def test_compressed_sum_error_does_not_grow_with_the_devices(found, case):
    assert found["compressed_sums"][case]["error"] == pytest.approx(0.0092, abs=0.0003)


@pytest.mark.parametrize("case", CASES)
def test_compressed_sum_sends_the_stated_bytes(found, case):
    one = found["compressed_sums"][case]
    assert one["link_bytes"] == one["sent_bytes"]
    assert one["counted"] == {"all-to-all": 2, "all-gather": 2}


def test_compressed_sum_sends_a_quarter_of_the_bytes_of_float32(found):
    sent, exact = found["compressed_sums"]["8"]["sent_bytes"], found["exact_sum"]
    assert sent / exact == (1 + 4 / 128) / 4


def test_compressed_sum_of_a_token_is_independent_of_other_tokens(found):
    assert found["special_values"]["is_independent"]


def test_compressed_sum_preserves_zeros_and_non_finite_values(found):
    one = found["special_values"]
    assert one["zeros"] and not one["hides_non_finite"] and not one["spreads_non_finite"]


@pytest.mark.parametrize("case", ["1 8", "13 8", "16 2"])
@pytest.mark.parametrize("parts", ["outputs", "tokens"])
def test_overlapped_product_equals_the_product(found, parts, case):
    one = found["overlapped"][f"{parts} {case}"]
    assert one["is_same"] and one["error"] < 1e-6
    hops = int(case.split()[1]) - 1
    assert one["counted"] == {"collective-permute": hops, "all-gather": 1}


def test_product_is_overlapped_if_outputs_divide_or_tokens_are_many(found):
    in_parts = {"collective-permute": 1, "all-gather": 1}
    assert found["choices"] == {
        "array": in_parts,
        "outputs that do not divide": {"all-reduce": 1},
        "no array": {"all-reduce": 1},
        "no array, many tokens": in_parts,
        "no array, many tokens, in order": {"all-gather": 1},
    }


@pytest.mark.parametrize(
    ("how", "error", "counted"),
    [
        ("exact", 1e-6, {"all-reduce": 1}),
        ("int8", 0.015, {"all-to-all": 2, "all-gather": 2}),
        ("overlap", 1e-6, {"collective-permute": 7, "all-gather": 1}),
        ("in order", 1e-6, {"all-gather": 1}),
        ("overlap in order", 1e-6, {"collective-permute": 7, "all-gather": 1}),
    ],
)
def test_layer_sums_as_configured_by_its_layout(found, how, error, counted):
    one = found["linears"][how]
    assert one["is_same"] and one["error"] < error
    assert one["counted"] == counted


@pytest.mark.parametrize("overlaps", ["False", "True"])
def test_shards_of_a_token_are_quantized_with_the_scale_of_the_whole_token(found, overlaps):
    one = found["quantized_tokens"][overlaps]
    assert one["is_same"] and one["error"] < 1e-6


def test_layer_has_two_sums_and_no_other_collective(found):
    """The only other collective of that size is the sum of the embedding.

    None is larger than the candidates of all vocabulary shards, as logits, weights or pages would
    be.
    """
    one = found["layers"]
    assert one["per_layer"] == [[["all-reduce", one["sum_bytes"]]] * 2] * 2
    assert one["large"] == {"all-reduce": 2 * 2 + 1}
    assert one["largest"] == one["candidate_bytes"] < one["head_bytes_per_device"]


def test_sum_that_is_both_compressed_and_overlapped_is_refused():
    with pytest.raises(MeshError, match=r"mesh.all_reduce = 'int8' with mesh.overlap = true.*one"):
        Layout.of({"tensor": 2}, all_reduce="int8", overlaps=True)


def test_unknown_kind_of_sum_is_refused():
    with pytest.raises(MeshError, match=r"mesh.all_reduce is 'int4'; there are exact, int8"):
        Layout.of({"tensor": 2}, all_reduce="int4")
