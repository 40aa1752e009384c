"""Experts over `expert` and `tensor`: one device's outputs, by either form, and nothing dropped."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.nn.experts import Experts, ExpertsConfig, RouterConfig
from jaxinfer.nn.layers import Numerics
from jaxinfer.sharding.experts import should_dispatch
from jaxinfer.sharding.mesh import MeshError
from jaxinfer.sharding.rules import Layout
from tests.support.child_process import findings
from tests.support.paths import SUPPORT

SCRIPT = SUPPORT / "expert_parallel_child.py"
MESHES = ("expert=8", "expert=4 tensor=2", "expert=2 tensor=4")
FORMS = ("kept", "sent")
# float32 sums of tens of numbers in another order; of one token's vector, relative to its length.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process with eight devices found; see tests/support/expert_parallel_child.py."""
    return findings(SCRIPT, XLA_FLAGS="")  # bits are of the programs that are served


@pytest.mark.parametrize("name", ["mixtral", "qwen", "deepseek", "gpt-oss"])
@pytest.mark.parametrize(
    "case", [*(f"{mesh} {form}" for mesh in MESHES for form in FORMS), "tensor=8 kept"]
)
def test_a_mesh_computes_what_one_device_does(found, case, name):
    result = found["models"][case][name]
    assert result["error"] < ROUNDING
    assert result["same"], "every device has the same bits"


@pytest.mark.parametrize("form", FORMS)
def test_quantized_experts_are_split_packed(found, form):
    assert found["quantized"][form]["error"] < ROUNDING


@pytest.mark.parametrize("form", FORMS)
def test_in_tiles_a_tokens_bits_are_its_own(found, form):
    result = found["invariant"][form]
    assert result["error"] < ROUNDING
    assert result["same"] and result["own"]
    # Over eight devices sums are made in order; over the two of `tensor` there is one order.
    assert result["all-reduces"] == {"kept": 0, "sent": 1}[form] * 2, "one for each of two calls"


def test_sums_may_be_compressed(found):
    """The layout's `all_reduce` is honoured: off by int8's rounding, no more."""
    assert all(1e-4 < found["compressed"][form]["error"] < 0.05 for form in FORMS)


def test_collectives_of_a_layer(found):
    """Compiled, expert 4 x tensor 2; the sum of shared experts joins that of the kept form."""
    sent = {"all-gather": 2, "all-to-all": 2, "all-reduce": 1}
    assert found["quantized"]["kept"]["collectives"] == {"all-reduce": 1}
    assert found["quantized"]["sent"]["collectives"] == sent
    assert found["shared"] == {"kept": {"all-reduce": 1}, "sent": {**sent, "all-reduce": 2}}


@pytest.mark.parametrize("case", ["drawn", "one", "few", "own"])
@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_rows_arrive_once_and_come_back_to_their_place(found, form, case):
    """Spread by chance; all to one device; none to some; each device to others than the next."""
    assert found["journeys"][form][case] == {"once": True, "back": True}


def test_experts_that_do_not_divide_are_refused():
    numerics = Numerics(layout=Layout.of({"expert": 4}))
    message = r"experts is 6, which expert 4 does not divide; possible sizes: 1, 2, 3, 6"
    with pytest.raises(MeshError, match=message):
        Experts(16, ExpertsConfig(RouterConfig(6, 2), 8), numerics)
    numerics = Numerics(layout=Layout.of({"tensor": 3}))
    with pytest.raises(MeshError, match="expert_ffn is 8, which tensor 3 does not divide"):
        Experts(16, ExpertsConfig(RouterConfig(6, 2), 8), numerics)


@pytest.mark.parametrize(
    ("T", "k", "e", "t", "expected"),
    [
        (8192, 2, 1, 8, False),  # no one to send to
        (8192, 2, 4, 1, False),  # e = 2 k: as many bytes
        (8192, 2, 8, 1, True),
        (64, 2, 8, 1, False),  # fewer bytes, but more launches
        (8192, 8, 16, 1, False),
        (8192, 8, 32, 1, True),
        (8192, 8, 16, 4, False),
        (1, 8, 256, 1, False),
    ],
)
def test_rows_are_sent_where_that_costs_less(T, k, e, t, expected):
    assert should_dispatch(T, k, e, t, row_bytes=8192) == expected


def test_the_bytes_are_those_of_rings():
    """By hand, at the length where both forms cost the same: 3 MiB are 1,755 tokens' gain."""
    e, k, row_bytes = 8, 2, 4096
    kept = 2 * (e - 1) / e * row_bytes  # an all-reduce, of a token
    sent = 2 * k / e * (e - 1) / e * row_bytes + (e - 1) / e * row_bytes  # its rows; the gather
    last = int(3 * 2**20 / (kept - sent)) // e * e  # no tokens are padded
    assert not should_dispatch(last, k, e, 1, row_bytes)
    assert should_dispatch(last + e, k, e, 1, row_bytes)
