"""Experts sharded over `expert` and `tensor` equal one device, whether selected or dispatched."""

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
FORMS = ("select", "dispatch")
# The relative error of one token's vector: float32 sums of tens of numbers in another order.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of a process with eight devices (tests/support/expert_parallel_child.py)."""
    return findings(SCRIPT, XLA_FLAGS="")  # bitwise results need the optimizations of serving


@pytest.mark.parametrize("name", ["mixtral", "qwen", "deepseek", "gpt-oss"])
@pytest.mark.parametrize(
    "case", [*(f"{mesh} {form}" for mesh in MESHES for form in FORMS), "tensor=8 select"]
)
def test_experts_on_a_mesh_equal_one_device(found, case, name):
    result = found["models"][case][name]
    assert result["error"] < ROUNDING
    assert result["same"], "devices have different bits"


@pytest.mark.parametrize("form", FORMS)
def test_quantized_experts_are_sharded_in_packed_form(found, form):
    assert found["quantized"][form]["error"] < ROUNDING


@pytest.mark.parametrize("form", FORMS)
def test_batch_invariant_bits_of_a_token_are_independent_of_its_batch(found, form):
    result = found["batch_invariant"][form]
    assert result["error"] < ROUNDING
    assert result["same"] and result["is_independent"]
    # Eight devices need sums in a fixed order; two, as in `tensor`, have only one order.
    assert result["all-reduces"] == {"select": 0, "dispatch": 1}[form] * 2, "of two calls"


def test_sums_of_experts_can_be_compressed(found):
    """The layout's `all_reduce` applies, so the error is that of int8 rounding."""
    assert all(1e-4 < found["compressed"][form]["error"] < 0.05 for form in FORMS)


def test_collectives_of_a_layer_are_minimal(found):
    """The mesh is expert=4, tensor=2; selecting adds shared experts to the one sum of the layer."""
    dispatch = {"all-gather": 2, "all-to-all": 2, "all-reduce": 1}
    assert found["quantized"]["select"]["collectives"] == {"all-reduce": 1}
    assert found["quantized"]["dispatch"]["collectives"] == dispatch
    assert found["shared"] == {
        "select": {"all-reduce": 1},
        "dispatch": {**dispatch, "all-reduce": 2},
    }


@pytest.mark.parametrize("case", ["random", "one device", "few devices", "unequal"])
@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_rows_arrive_once_and_return_to_their_place(found, form, case):
    """Rows go to random devices, all to one, none to some, or from each device to others."""
    assert found["dispatch_and_combine"][form][case] == {"once": True, "back": True}


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
        (8192, 2, 1, 8, False),  # no other device
        (8192, 2, 4, 1, False),  # e = 2 k: equally many bytes
        (8192, 2, 8, 1, True),
        (64, 2, 8, 1, False),  # fewer bytes, but more launches
        (8192, 8, 16, 1, False),
        (8192, 8, 32, 1, True),
        (8192, 8, 16, 4, False),
        (1, 8, 256, 1, False),
    ],
)
def test_rows_are_dispatched_if_that_costs_less(T, k, e, t, expected):
    assert should_dispatch(T, k, e, t, row_bytes=8192) == expected


def test_break_even_follows_the_bytes_of_ring_collectives():
    """At the break-even number of tokens, the bytes saved equal the 3 MiB of three launches."""
    e, k, row_bytes = 8, 2, 4096
    select = 2 * (e - 1) / e * row_bytes  # the all-reduce, per token
    gather = (e - 1) / e * row_bytes
    dispatch = 2 * k / e * (e - 1) / e * row_bytes + gather  # rows in both directions
    last = int(3 * 2**20 / (select - dispatch)) // e * e  # a multiple of e, so without padding
    assert not should_dispatch(last, k, e, 1, row_bytes)
    assert should_dispatch(last + e, k, e, 1, row_bytes)
