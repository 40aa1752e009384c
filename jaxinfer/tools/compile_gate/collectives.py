"""The collectives of a compiled program: their number, their bytes, and their traffic on the links.

The bytes that a device sends are those of ring algorithms over n devices with a result of B bytes
on each (R.
Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
2005; NCCL's "bus bandwidth" is the same):

    all-reduce           2 (n - 1) / n  B
    all-gather             (n - 1) / n  B
    all-to-all             (n - 1) / n  B
    reduce-scatter         (n - 1)      B      the operand is n results
    collective-permute                  B
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxinfer.tools.compile_gate.text import (
    HloInstruction,
    HloModule,
    array_bytes,
    is_launch,
    trip_count,
)

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Kinds whose asynchronous start returns (operands, results, ...); an all-reduce returns results
# alone.
RETURNS_OPERANDS = tuple(kind for kind in KINDS if kind != "all-reduce")
# A layer under tensor parallelism has a sum after attention and one after the MLP, each as one
# all-reduce or as two halves (Megatron-LM, arXiv:1909.08053, section 3). In a parallel block, where
# neither depends on the other, XLA merges both (seen for v5e and H100, jax 0.10.2).
LAYER_FORMS: tuple[Mapping[str, float], ...] = (
    {"all-reduce": 2},
    {"reduce-scatter": 2, "all-gather": 2},
)

_LISTED = re.compile(r"replica_groups=\{((?:\{[0-9,]+\},?)+)\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=@?mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS_NAMED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")  # 'a', or its part 'a':(pre-size)size
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program that runs on every device."""

    kind: str
    bytes: int  # size of its results on one device
    group_size: int  # devices that take part in one of its groups
    times: int = 1  # executions in one run of the program
    op_name: str = ""  # its origin in the traced program, such as `jit(_step)/block_1/...`
    groups: Groups = ()  # device positions in the mesh; for a permutation, its cycles

    @property
    def link_bytes(self) -> int:
        """Bytes that a device sends in one execution, by the table above."""
        n, B = self.group_size, self.bytes
        if self.kind == "all-reduce":
            return 2 * B * (n - 1) // n
        if self.kind == "reduce-scatter":
            return B * (n - 1)
        if self.kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
            return B * (n - 1) // n
        return B


def find_collectives(module: HloModule) -> list[Collective]:
    """List all collectives of a program.

    One in a loop counts as often as the loop is known to run, else once. All branches of a
    conditional are listed.
    """
    return list(_found(module, module.entry, 1))


def collectives(module: HloModule) -> dict[str, dict[str, int]]:
    """The number of collectives of each kind in one run of the program, the bytes of their results
    on one device, and the bytes that a device sends."""
    return _by_kind(find_collectives(module))


def layer_collectives(module: HloModule, layer: int) -> dict[str, dict[str, int]]:
    """`collectives` of one layer, found by the name that its instructions carry."""
    return _by_kind(one for one in find_collectives(module) if f"block_{layer}/" in one.op_name)


def permutes_without_work(module: HloModule, layer: int) -> int:
    """Count a layer's collective-permutes that overlap with no launch: nothing starts between their
    start and their end, or one instruction is both. The device then waits for the link."""
    return sum(
        not _has_work(computation, place)
        for computation in module.computations.values()
        for place, one in enumerate(computation)
        if one.opcode in ("collective-permute", "collective-permute-start")
        and f"block_{layer}/" in one.op_name
    )


def _has_work(computation: Sequence[HloInstruction], place: int) -> bool:
    end = re.compile(rf"%?{re.escape(computation[place].name)}\b(?![.\-])")
    has_work = False
    for later in computation[place + 1 :]:
        if later.opcode == "collective-permute-done" and end.search(later.rest):
            return has_work
        has_work |= is_launch(later)
    return False


def _by_kind(found: Iterable[Collective]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for one in found:
        entry = totals.setdefault(one.kind, {"count": 0, "bytes": 0, "link_bytes": 0})
        entry["count"] += one.times
        entry["bytes"] += one.times * one.bytes
        entry["link_bytes"] += one.times * one.link_bytes
    return totals


def link_bytes(module: HloModule) -> int:
    """Bytes that a device sends in one run of the program."""
    return sum(one.times * one.link_bytes for one in find_collectives(module))


def per_layer(shallow: HloModule, deep: HloModule, num_layers: int) -> dict[str, dict[str, float]]:
    """The collectives that one layer adds, by kind: the difference of two programs that differ by
    `num_layers` layers, so that what a step does once cancels."""
    before, after = collectives(shallow), collectives(deep)
    added = {}
    for kind in sorted(before | after):
        a, b = before.get(kind, {}), after.get(kind, {})
        change = {key: (b.get(key, 0) - a.get(key, 0)) / num_layers for key in (a | b)}
        if any(change.values()):
            added[kind] = change
    return added


def layer_problems(
    added: Mapping[str, Mapping[str, float]], *, is_parallel: bool = False
) -> list[str]:
    """Explain why a layer's collectives are not those of tensor parallelism: two sums, or one in a
    parallel block. The list is empty where they are.

    `added` is the result of `per_layer` or `layer_collectives`.
    """
    counts = {kind: entry["count"] for kind, entry in added.items()}
    if counts in LAYER_FORMS or (is_parallel and counts == {"all-reduce": 1}):
        return []
    found = ", ".join(f"{counts[kind]:g} {kind}" for kind in sorted(counts)) or "none"
    return [f"a layer adds the collectives {found}; tensor parallelism takes 2 all-reduce"]


def _found(module: HloModule, computation: str, times: int) -> Iterator[Collective]:
    for instruction in module.computations.get(computation, ()):
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            size = _result_bytes(instruction, kind)
            groups = _groups(instruction, module.num_devices)
            name = instruction.op_name
            yield Collective(kind, size, len(groups[0]), times, name, groups)
            continue  # its own computation adds two numbers
        count = trip_count(instruction) if instruction.opcode == "while" else None
        for name in _called(instruction):
            yield from _found(module, name, times if count is None else times * count)


def _called(instruction: HloInstruction) -> list[str]:
    keys = ("body", "condition", "calls", "to_apply", "called_computation")
    return [name for key in keys if (name := instruction.called(key))] + instruction.branches


def _result_bytes(instruction: HloInstruction, kind: str) -> int:
    parts = elements(instruction.type)
    if instruction.opcode.endswith("-start") and kind in RETURNS_OPERANDS and len(parts) > 1:
        parts = parts[1:2]  # (operands, results, counters...)
    return sum(map(sum, map(array_bytes, parts)))


def elements(type_text: str) -> list[str]:
    """The element types of a tuple's type, such as `((f32[2], s8[4]{0}), u32[])`; a type that is no
    tuple is its only element."""
    if not type_text.startswith("("):
        return [type_text]
    parts, depth = [""], 0
    for character in type_text[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def groups_over(sizes: Mapping[str, int], parts: Iterable[tuple[str, int, int]]) -> Groups:
    """Group the devices of a mesh that differ only along `parts` of its axes.

    Devices are numbered with the last axis varying fastest. A part is (axis, pre-size, size); a
    whole axis is (axis, 1, its size).
    """
    axes, places = list(sizes), []
    for axis, before, size in parts:
        inner = math.prod(sizes[other] for other in axes[axes.index(axis) + 1 :])
        places.append((inner * sizes[axis] // (before * size), size))
    groups: dict[int, list[int]] = {}
    for device in range(math.prod(sizes.values())):
        along = sum(device // stride % size * stride for stride, size in places)
        groups.setdefault(device - along, []).append(device)
    return tuple(map(tuple, groups.values()))


def _groups(instruction: HloInstruction, num_devices: int) -> Groups:
    """The device groups of a collective.

    They are written as `{{0,1},{2,3}}`, as `[2,4]<=[8]` (groups by devices of each) with or without
    a transposition, or as axes of a mesh; without any, all devices are one group. The groups of a
    permute are the cycles of its pairs.
    """
    text = instruction.rest
    if pairs := _PAIRS.search(text):
        found = re.findall(r"(\d+),(\d+)", pairs.group(1))
        return _cycles({int(source): int(target) for source, target in found})
    if listed := _LISTED.search(text):
        return tuple(map(_numbers, re.findall(r"\{([0-9,]+)\}", listed.group(0))))
    if iota := _IOTA.search(text):
        shape, dims, order = map(_numbers, iota.groups(default=""))
        devices = np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))
        return tuple(map(tuple, devices.reshape(-1, shape[-1]).tolist()))
    if mesh := _MESH.search(text):
        sizes = {axis: int(size) for axis, size in _AXIS_SIZE.findall(mesh.group(1))}
        named = _AXIS_NAMED.findall(mesh.group(2))
        return groups_over(sizes, [(a, int(b or 1), int(n or sizes[a])) for a, b, n in named])
    return (tuple(range(num_devices)),)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _cycles(goes_to: Mapping[int, int]) -> Groups:
    """The cycles and open chains of a permutation. A chain begins at the device that receives
    nothing."""
    cycles, seen = [], set()
    for start in [*(goes_to.keys() - set(goes_to.values())), *goes_to]:
        device, way = start, []
        while device is not None and device not in seen:
            seen.add(device)
            way.append(device)
            device = goes_to.get(device)
        cycles += [tuple(way)] if way else []
    return tuple(cycles)
