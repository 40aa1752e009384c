"""What is read of collectives in a compiled program's text: kind, bytes, group, turns, links.

The programs that eight devices really run are counted in tests/parallel/test_collectives.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.tools.compile_gate import collectives as counts
from jaxinfer.tools.compile_gate import report
from jaxinfer.tools.compile_gate.text import parse_hlo

Collective = counts.Collective

GROUPS = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
NAME = 'metadata={op_name="jit(f)/block_1/psum"}'


def module(*lines: str, loop: str = "", num_devices: int = 8) -> Any:
    """A program of these instructions, and of a loop of one all-reduce if its attributes are
    given."""
    turns = f"  %w = f32[8]{{0}} while(%a), condition=%test, body=%turn{loop}\n" if loop else ""
    body = "\n".join(f"  {line}" for line in lines)
    return parse_hlo(
        f"""HloModule jit_f, is_scheduled=true, num_partitions={num_devices}

%add (x: f32[], y: f32[]) -> f32[] {{
  ROOT %s = f32[] add(%x, %y)
}}

%turn (t: f32[8]) -> f32[8] {{
  ROOT %r = f32[8]{{0}} all-reduce(%t), {GROUPS}, to_apply=%add
}}

%test (t: f32[8]) -> pred[] {{
  ROOT %c = pred[] constant(false)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
{turns}{body}
}}
"""
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # Result's type, and what an asynchronous start gives of it.
        (f"%r = f32[8]{{0}} all-reduce(%a), {GROUPS}, to_apply=%add", ("all-reduce", 32, 4, 48)),
        (f"%r = f32[8]{{0}} all-reduce-start(%a), {GROUPS}", ("all-reduce", 32, 4, 48)),
        (
            f"%r = (f32[8]{{0}}, bf16[2,4]{{1,0}}) all-reduce-start(%a, %b), {GROUPS}",
            ("all-reduce", 48, 4, 72),
        ),
        (f"%r = bf16[32]{{0}} all-gather(%a), {GROUPS}", ("all-gather", 64, 4, 48)),
        (
            f"%r = (bf16[8]{{0:T(8,128)(2,1)}}, bf16[32]{{0}}) all-gather-start(%a), {GROUPS}",
            ("all-gather", 64, 4, 48),
        ),
        (
            "%r = ((s8[8]{0}, f32[1]{0}), (s8[32]{0}, f32[4]{0})) all-gather-start(%a, %b), "
            f"{GROUPS}",
            ("all-gather", 48, 4, 36),
        ),
        (f"%r = f32[2]{{0}} reduce-scatter(%a), {GROUPS}", ("reduce-scatter", 8, 4, 24)),
        (
            f"%r = ((f32[8]{{0}}), f32[2]{{0}}) reduce-scatter-start(%a), {GROUPS}",
            ("reduce-scatter", 8, 4, 24),
        ),
        (
            f"%r = (f32[2]{{0}}, f32[2]{{0}}, f32[2]{{0}}, f32[2]{{0}}) all-to-all(%a), {GROUPS}",
            ("all-to-all", 32, 4, 24),
        ),
        (
            f"%r = ((s8[8]{{0}}), s8[8]{{0}}) all-to-all-start(%a), {GROUPS}",
            ("all-to-all", 8, 4, 6),
        ),
        (f"%r = f32[8]{{0}} collective-permute(%a), {PAIRS}", ("collective-permute", 32, 4, 32)),
        (
            f"%r = (f32[8]{{0}}, f32[8]{{0}}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) "
            f"collective-permute-start(%a), {PAIRS}",
            ("collective-permute", 32, 4, 32),
        ),
    ],
)
def test_collective_is_parsed_from_hlo(line, expected):
    [found] = counts.find_collectives(module(f"{line}, {NAME}"))
    assert (found.kind, found.bytes, found.group_size, found.link_bytes) == expected
    assert (found.times, found.op_name) == (1, "jit(f)/block_1/psum")


ALL = (tuple(range(8)),)
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=[2,4]<=[8]", HALVES),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[2,4]<=[2,2,2]T(0,2,1)", ((0, 2, 1, 3), (4, 6, 5, 7))),
        ("replica_groups=[1,8]<=[8]", ALL),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", HALVES),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", ALL),
        ("replica_groups=mesh['b'=8] {'b':(2)4}", HALVES),
        ("replica_groups=mesh['b'=8] {'b':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['b'=8,'c'=2] {'b':(4)2}", tuple((4 * i + j, 4 * i + j + 2)
                                                              for i in range(4) for j in (0, 1))),
        ("replica_groups={}", ALL),
        ("channel_id=1", ALL),
    ],
)  # fmt: skip
def test_groups_are_parsed_from_every_form(text, groups):
    [found] = counts.find_collectives(
        module(f"%r = f32[8]{{0}} all-reduce(%a), {text}, to_apply=%add")
    )
    assert (found.groups, found.group_size) == (groups, len(groups[0]))


@pytest.mark.parametrize(
    ("pairs", "groups"),
    [
        ("{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}", HALVES),
        ("{0,2},{2,0},{1,3},{3,1}", ((0, 2), (1, 3))),
        ("{2,4},{0,2},{4,6}", ((0, 2, 4, 6),)),  # ends, and is not listed in order
    ],
)
def test_permutation_groups_are_its_cycles(pairs, groups):
    line = f"%r = f32[8]{{0}} collective-permute(%a), source_target_pairs={{{pairs}}}"
    [found] = counts.find_collectives(module(line))
    assert found.groups == groups


def test_asynchronous_pair_is_counted_once():
    found = counts.collectives(
        module(
            f"%s = f32[8]{{0}} all-reduce-start(%a), {GROUPS}, to_apply=%add",
            "%d = f32[8]{0} all-reduce-done(%s)",
            f"%g = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%d), {GROUPS}",
            "ROOT %e = f32[32]{0} all-gather-done(%g)",
        )
    )
    assert found == {
        "all-reduce": {"count": 1, "bytes": 32, "link_bytes": 48},
        "all-gather": {"count": 1, "bytes": 128, "link_bytes": 96},
    }


@pytest.mark.parametrize(
    ("loop", "count"),
    [(', backend_config={"known_trip_count":{"n":"3"}}', 3), (", metadata={}", 1)],
)
def test_loop_is_multiplied_by_its_trip_count(loop, count):
    program = module(loop=loop)
    assert counts.collectives(program)["all-reduce"] == {
        "count": count,
        "bytes": 32 * count,
        "link_bytes": 48 * count,
    }
    assert counts.link_bytes(program) == 48 * count


def test_loop_without_iterations_sends_nothing():
    assert counts.link_bytes(module(loop=', backend_config={"known_trip_count":{"n":"0"}}')) == 0


def sums(num: int, *more: str) -> Any:
    line = "%r.{} = f32[8]{{0}} all-reduce(%a), " + GROUPS.replace("{", "{{").replace("}", "}}")
    return module(*(line.format(i) for i in range(num)), *more)


def test_work_done_once_is_not_counted_per_layer():
    gather = f"%g = f32[32]{{0}} all-gather(%a), {GROUPS}"
    added = counts.per_layer(sums(5, gather), sums(9, gather), 2)
    assert added == {"all-reduce": {"count": 2, "bytes": 64, "link_bytes": 96}}
    assert counts.layer_problems(added) == []


def test_layer_sums_may_be_halved_or_merged():
    halves = {kind: {"count": 2.0} for kind in ("reduce-scatter", "all-gather")}
    assert counts.layer_problems(halves) == []
    one = {"all-reduce": {"count": 1.0}}
    assert counts.layer_problems(one) and not counts.layer_problems(one, is_parallel=True)


def test_layer_collectives_are_found_by_name():
    found = module(
        f"%r = f32[8]{{0}} all-reduce(%a), {GROUPS}, {NAME}",
        f"%s = f32[8]{{0}} all-reduce(%r), {GROUPS}",
    )
    assert counts.layer_collectives(found, 1) == {
        "all-reduce": {"count": 1, "bytes": 32, "link_bytes": 48}
    }
    assert counts.layer_collectives(found, 2) == {}


def test_permute_needs_work_between_start_and_end():
    both = "(f32[8]{0}, f32[8]{0})"
    start = lambda i: f"%p.{i} = {both} collective-permute-start(%a), {PAIRS}, {NAME}"
    work = "%w = f32[8]{0} fusion(%a), kind=kLoop, calls=%add"
    end = lambda i: f"%d.{i} = f32[8]{{0}} collective-permute-done(%p.{i})"
    hidden = [start(1), start(11), work, end(11), end(1)]
    bare = [start(2), end(2), work]
    at_once = f"%q = f32[8]{{0}} collective-permute(%a), {PAIRS}, {NAME}"
    assert counts.permutes_without_work(module(*hidden), 1) == 0
    assert counts.permutes_without_work(module(*bare), 1) == 1
    assert counts.permutes_without_work(module(*bare, *hidden, at_once), 1) == 2
    assert counts.permutes_without_work(module(*bare), 2) == 0


def test_gate_requires_exactly_the_recorded_collectives():
    row = {"id": "p", "status": "compiled", "per_layer": {"launches": 8, "collectives": 1.0}}
    [problem] = report.problems(row, {"p": {"launches": 9, "collectives": 2.0}})
    assert problem == "collectives a layer: 1, recorded 2"


@pytest.mark.parametrize(
    ("shallow", "deep", "expected"),
    [
        (sums(1), sums(1), "none"),
        (sums(1), sums(7), "3 all-reduce"),
        (sums(1), sums(4), "1.5 all-reduce"),
        (
            sums(1),
            sums(5, f"%g = f32[32]{{0}} all-gather(%a), {GROUPS}"),
            "0.5 all-gather, 2 all-reduce",
        ),
    ],
)
def test_layer_with_other_collectives_is_a_problem(shallow, deep, expected):
    [problem] = counts.layer_problems(counts.per_layer(shallow, deep, 2))
    assert f"a layer adds the collectives {expected};" in problem


def test_gate_fails_on_other_collectives():
    [problem] = counts.layer_problems(counts.per_layer(sums(1), sums(7), 2))
    row = {"id": "v5e:2x2 preset", "status": "compiled", "collective_problems": [problem]}
    assert report.problems(row, {}) == [problem]
