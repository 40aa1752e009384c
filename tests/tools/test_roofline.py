"""The planner's roofline compared with numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.tools.compile_gate import collectives
from jaxinfer.tools.planner import plans, roofline, search
from tests.support.tiny_plans import LLAMA, MIXTRAL, chip, compile_matrix, program

Collective, Load, Work = collectives.Collective, roofline.StepLoad, roofline.StepWork
load_target = compile_matrix.load_target

MB = 1_000_000


def test_bound_is_the_longer_of_memory_and_compute_plus_links():
    target = load_target("cpu")  # 20 GB/s, 100 GFLOP/s
    least = roofline.roofline_bound(Work(2e9, 1e9, {"bfloat16": 5e9, "int8": 5e9}), target, 0.05)
    assert (least.weights, least.cache, least.compute) == pytest.approx((0.1, 0.05, 0.1))
    assert least.seconds == pytest.approx(0.15 + 0.05) and least.limit == "memory"
    busy = roofline.roofline_bound(Work(2e9, 1e9, {"bfloat16": 4e10}), target, 0.5)
    assert busy.seconds == pytest.approx(0.4 + 0.5) and busy.limit == "links"


def test_unsupported_number_type_runs_at_the_wider_rate():
    h100, a100 = load_target("h100"), load_target("a100")
    assert roofline.flop_rate(h100, "float8_e4m3fn") == 1979e12
    assert roofline.flop_rate(a100, "float8_e4m3fn") == roofline.flop_rate(a100, "bfloat16")


@pytest.mark.parametrize(
    ("target", "sizes", "collective", "seconds"),
    [
        # A ring of 8 over NVLink: 2 * 7/8 of a megabyte at 450 GB/s.
        ("h100:8", {"tensor": 8}, ("all-reduce", "tensor"), 1.75 * MB / 450e9),
        # Inside each of two hosts as before; of the other host's sums an eighth a GPU, at 50 GB/s.
        ("h100:2x8", {"tensor": 16}, ("all-reduce", "tensor"), 1.75 * MB / 450e9 + MB / 8 / 50e9),
        # 8 devices of one host, though there are two hosts.
        ("h100:2x8", {"pipe": 2, "tensor": 8}, ("all-reduce", "tensor"), 1.75 * MB / 450e9),
        ("h100:2x8", {"pipe": 2, "tensor": 8}, ("collective-permute", "pipe"), MB / 50e9),
        # As many stages as devices share a layer: sums of a host's, and of one of each host.
        ("h100:8x8", {"pipe": 8, "tensor": 8}, ("all-reduce", "tensor"), 1.75 * MB / 450e9),
        ("h100:8x8", {"pipe": 8, "tensor": 8}, ("all-reduce", "pipe"), 1.75 * MB / 50e9),
        # Of three groups the second lies on both hosts.
        ("h100:2x6", {"pipe": 3, "tensor": 4}, ("all-reduce", "tensor"),
         MB / 450e9 + MB / 2 / 50e9),
        # Stages of one host's; a ring of sixteen, of whose hand-overs two are between hosts.
        ("h100:2x8", {"pipe": 8}, ("collective-permute", "pipe"), MB / 450e9),
        ("h100:2x8", {"seq": 16}, ("collective-permute", "seq"), MB / 50e9),
        # 7/8 inside; of the other host's half, an eighth a GPU.
        ("h100:2x8", {"tensor": 16}, ("all-gather", "tensor"), 0.875 * MB / 450e9 + MB / 16 / 50e9),
        ("h100:2x8", {"expert": 16}, ("all-to-all", "expert"), 0.875 * MB / 450e9 + MB / 2 / 50e9),
        # The result is a sixteenth: 7 of 8 eighths inside, then one sixteenth over the network.
        ("h100:2x8", {"tensor": 16}, ("reduce-scatter", "tensor"), 14 * MB / 450e9 + MB / 50e9),
        # Four links of 50 GB/s a chip; in a square of 2 x 2 only two of them lead anywhere.
        ("v5e:4x4", {"tensor": 16}, ("all-reduce", "tensor"), 1.875 * MB / 200e9),
        ("v5e:2x2", {"tensor": 4}, ("all-reduce", "tensor"), 1.5 * MB / 100e9),
        # Two links of 100 GB/s a chip, which its two devices share.
        ("tpu7x:2x2x1", {"tensor": 8}, ("all-reduce", "tensor"), 1.75 * MB / 100e9),
    ],
)  # fmt: skip
def test_collective_runs_at_the_rate_of_its_links(target, sizes, collective, seconds):
    kind, axis = collective
    groups = collectives.groups_over(sizes, [(axis, 1, sizes[axis])])
    one = Collective(kind, MB, sizes[axis], times=3, groups=groups)
    assert roofline.link_seconds([one], load_target(target)) == pytest.approx(3 * seconds, rel=1e-5)


@pytest.mark.parametrize(
    ("groups", "rate"),
    [("[8,8]<=[64]", 450e9), ("[8,8]<=[8,8]T(1,0)", 50e9)],
)
def test_group_devices_are_read_from_the_program(monkeypatch, groups, rate):
    """Eight of one host, and one of each of eight hosts."""
    step = program(monkeypatch, "h100:8x8", LLAMA | {"num_hidden_layers": 8}, mesh=MESH)
    text = TEXT.format(groups=groups)
    traffic = plans.compiled_traffic(step, text)
    assert traffic.by_kind["all-reduce"]["link_bytes"] == 2 * MB * 7 // 8
    assert traffic.seconds == pytest.approx(1.75 * MB / rate, rel=1e-5)


MESH = "pipe=8,tensor=8"
TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=64

ENTRY %main (x: s8[1000000]) -> s8[1000000] {{
  %x = s8[1000000]{{0}} parameter(0)
  ROOT %r = s8[1000000]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%a
}}
"""


def test_window_limits_attention_and_cache_reads():
    chunk = Load(rows=2, new=3, context=10)
    assert chunk.num_tokens == 6
    assert chunk.seen(None) == 2 * (8 + 9 + 10) and chunk.cached(None) == 2 * 10
    assert chunk.seen(9) == 2 * (8 + 9 + 9) and chunk.cached(9) == 2 * 10
    assert chunk.seen(4) == 2 * (4 + 4 + 4) and chunk.cached(4) == 2 * 6


# By hand: q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 128; the head 64 x 512.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
HEAD = 64 * 512
NORMS = 4 * 2 * 64 + 64


def test_the_work_of_a_decode_step_on_one_device(monkeypatch):
    work = roofline.step_work(program(monkeypatch, "v5e", LLAMA), Load(rows=4, new=1, context=128))
    rows = 4 * 64  # of the embedding
    assert work.weight_bytes == 2 * (4 * LAYER + HEAD + NORMS + rows)
    assert work.cache_bytes == 4 * 128 * 4 * 2 * (4 * 8) * 2
    attention = 4 * 128 * 4 * 2 * 8 * (8 + 8)
    assert work.flops == {"bfloat16": 2 * 4 * (4 * LAYER + HEAD) + attention}


def test_eight_devices_share_the_work_with_one_kv_head_each(monkeypatch):
    """4 KV heads are repeated to 8; every device has the norms."""
    step = program(monkeypatch, "v5e:2x4", LLAMA, mesh="tensor=8")
    work = roofline.step_work(step, Load(rows=4, new=1, context=128))
    layer = (LAYER + 2 * 64 * 32) / 8
    assert work.weight_bytes == 2 * (4 * layer + HEAD / 8 + NORMS + 4 * 64 / 8)
    assert work.cache_bytes == 4 * 128 * 4 * 2 * 8 * 2
    attention = 4 * 128 * 4 * 2 * (8 + 8)
    assert work.flops == {"bfloat16": 2 * 4 * (4 * layer + HEAD / 8) + attention}


def test_stage_has_its_layers_and_its_part_of_the_head(monkeypatch):
    step = program(monkeypatch, "v5e:2x2", LLAMA, mesh="pipe=4")
    work = roofline.step_work(step, Load(rows=1, new=1, context=128))
    assert work.flops == {"bfloat16": 2 * (LAYER + HEAD / 4) + 128 * 2 * 8 * 16}
    assert work.cache_bytes == 128 * 2 * (4 * 8) * 2


def test_expert_work_follows_the_routed_tokens(monkeypatch):
    step = program(monkeypatch, "v5e", MIXTRAL, chunk=64)
    one = roofline.step_work(step, Load(rows=1, new=1, context=128))
    many = roofline.step_work(step, Load(rows=64, new=1, context=128))
    dense = 2 * 64 * 64 + 2 * 64 * 32 + 64 * 8  # and the router
    expert = 3 * 64 * 128
    attention = 128 * 4 * 2 * 8 * 16
    assert one.flops["bfloat16"] == 2 * (4 * (dense + 2 * expert) + HEAD) + attention
    assert one.weight_bytes == 2 * (4 * (dense + 2 * expert) + HEAD + NORMS + 64)
    read = many.weight_bytes - 2 * (4 * dense + HEAD + NORMS + 64 * 64)
    assert read == pytest.approx(2 * 4 * 8 * expert * (1 - 0.75**64))


def test_sequence_devices_share_cache_and_long_steps(monkeypatch):
    step = program(monkeypatch, "v5e:2x2", LLAMA, mesh="seq=4", context=512, chunk=512, rows=64)
    few = roofline.step_work(step, Load(rows=64, new=1, context=128))
    products = 64 * 2 * (4 * LAYER + HEAD)
    assert few.flops == {"bfloat16": products + 64 * 128 * 4 * 2 * 8 * 16 / 4}
    assert few.cache_bytes == 64 * 128 * 4 * 2 * (4 * 8) * 2 / 4
    long = roofline.step_work(step, Load(rows=1, new=512, context=512))
    seen = 512 * 513 / 2
    assert long.flops == {"bfloat16": 128 * 2 * 4 * LAYER + 2 * HEAD + seen * 4 * 2 * 8 * 16 / 4}


@pytest.mark.parametrize(
    ("quant", "kinds"), [("int8", {"bfloat16"}), ("int8_w8a8", {"bfloat16", "int8"})]
)
def test_products_run_in_the_type_of_their_activations(monkeypatch, quant, kinds):
    step = program(monkeypatch, "v5e:2x2", LLAMA, mesh="tensor=4", quant=quant)
    work = roofline.step_work(step, Load(rows=4, new=1, context=128))
    assert set(work.flops) == kinds
    plain = program(monkeypatch, "v5e:2x2", LLAMA, mesh="tensor=4")
    assert sum(work.flops.values()) == sum(
        roofline.step_work(plain, Load(rows=4, new=1, context=128)).flops.values()
    )
    assert step.weight_bytes < plain.weight_bytes


def test_slice_rate_counts_a_chips_links(monkeypatch):
    assert roofline.slice_rate(chip(monkeypatch, "v5p:2x2x4").target) == 400e9
    assert roofline.slice_rate(chip(monkeypatch, "v5e").target) == 50e9


def added(step: Any, rows: int) -> list[tuple[str, int, int, int]]:
    load = Load(rows=rows, new=1, context=128)
    return [
        (c.kind, c.bytes, c.group_size, c.times) for c in search.estimated_collectives(step, load)
    ]


def test_stage_layers_sum_twice_and_send_once(monkeypatch):
    step = program(monkeypatch, "v5e:2x4", LLAMA, mesh="pipe=2,tensor=4")
    size = 4 * 64 * 2  # 4 rows of 64 numbers
    assert added(step, 4) == [("all-reduce", size, 4, 2 * 2), ("collective-permute", size, 2, 1)]
    assert added(program(monkeypatch, "v5e", LLAMA), 4) == []


def test_sequence_devices_merge_partial_results(monkeypatch):
    """A layer's 4 rows x 4 heads of float32: 8 values each in one sum, a maximum and a weight."""
    step = program(monkeypatch, "v5e:2x4", LLAMA, mesh="seq=4,tensor=2")
    heads = 4 * 4 * 4
    sums, *merged = added(step, 4)
    assert sums == ("all-reduce", 4 * 64 * 2, 2, 8)
    assert merged == [("all-reduce", heads * 8, 4, 4), ("all-reduce", heads, 4, 8)]


def test_many_tokens_use_a_ring(monkeypatch):
    """Of 512 a device has 128: keys and values to 3 others, queries to all and what they gather."""
    step = program(monkeypatch, "v5e:2x2", LLAMA, mesh="seq=4", rows=512, chunk=512)
    heads = 128 * 8
    assert added(step, 512) == [
        ("collective-permute", 128 * 2 * (4 * 8) * 2, 4, 3 * 4),
        ("collective-permute", heads * 8 * 2, 4, 4 * 4),
        ("collective-permute", heads * (8 + 1) * 4, 4, 5 * 4),
    ]
