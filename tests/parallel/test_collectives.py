"""Sums over devices: exact ones, compressed ones, and those made beside their product; and how many
of them a layer makes.

A process with eight CPU devices computes (tests/support/collectives_child.py); here is what must
hold.
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
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return findings(SCRIPT, timeout_s=240, **flags)


@pytest.mark.parametrize("case", CASES)
def test_a_compressed_sum_is_the_same_on_all_devices_and_within_its_bound(found, case):
    one = found["compressed_sums"][case]
    assert one["is_same"]
    rounding = 0.5 if case == "bfloat16" else 0  # of the result, to 8 bits
    assert 0 < one["of_bound"] <= 1 + rounding


@pytest.mark.parametrize("case", ["2", "4", "8"])
def test_its_error_on_normal_numbers_does_not_grow_with_the_devices(found, case):
    assert found["compressed_sums"][case]["error"] == pytest.approx(0.0092, abs=0.0003)


@pytest.mark.parametrize("case", CASES)
def test_it_sends_the_bytes_that_it_states(found, case):
    one = found["compressed_sums"][case]
    assert one["link_bytes"] == one["sent_bytes"]
    assert one["counted"] == {"all-to-all": 2, "all-gather": 2}


def test_it_sends_a_quarter_of_what_float32_takes(found):
    sent, exact = found["compressed_sums"]["8"]["sent_bytes"], found["exact_sum"]
    assert sent / exact == (1 + 4 / 128) / 4


def test_a_tokens_compressed_sum_does_not_depend_on_the_others(found):
    assert found["odd_sums"]["alone"]


def test_a_compressed_sum_keeps_zeros_and_hides_nothing_that_is_not_finite(found):
    one = found["odd_sums"]
    assert one["zeros"] and not one["is_hidden"] and not one["spreads"]


@pytest.mark.parametrize("case", ["1 8", "13 8", "16 2"])
@pytest.mark.parametrize("parts", ["outputs", "tokens"])
def test_a_product_in_parts_is_the_product(found, parts, case):
    one = found["overlapped"][f"{parts} {case}"]
    assert one["is_same"] and one["error"] < 1e-6
    hops = int(case.split()[1]) - 1
    assert one["counted"] == {"collective-permute": hops, "all-gather": 1}


def test_what_cannot_be_cut_is_summed_at_once_unless_its_tokens_are_many(found):
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
def test_a_layer_sums_as_its_layout_says(found, how, error, counted):
    one = found["linears"][how]
    assert one["is_same"] and one["error"] < error
    assert one["counted"] == counted


@pytest.mark.parametrize("overlaps", ["False", "True"])
def test_parts_of_a_token_are_quantized_by_the_scale_of_all_of_it(found, overlaps):
    one = found["by_token"][overlaps]
    assert one["is_same"] and one["error"] < 1e-6


def test_a_layer_makes_two_sums_and_nothing_else(found):
    """And the step has no other collective of that size but the embedding's sum; none is larger
    than the candidates of the vocabulary's parts, as logits, weights or pages would be."""
    one = found["layers"]
    assert one["by_layer"] == [[["all-reduce", one["sum_bytes"]]] * 2] * 2
    assert one["large"] == {"all-reduce": 2 * 2 + 1}
    assert one["largest"] == one["candidate_bytes"] < one["head_bytes_on_a_device"]


def test_a_sum_both_compressed_and_overlapped_is_refused():
    with pytest.raises(MeshError, match=r"mesh.all_reduce = 'int8' with mesh.overlap = true.*one"):
        Layout.of({"tensor": 2}, all_reduce="int8", overlaps=True)


def test_a_sum_of_another_name_is_refused():
    with pytest.raises(MeshError, match=r"mesh.all_reduce is 'int4'; there are exact, int8"):
        Layout.of({"tensor": 2}, all_reduce="int4")
