"""Parsers of compilers' output: kernels launched, loops, on-chip memory, register spills.

An XLA module's text (`compiled.as_text()`) is a list of computations of instructions; the entry
computation runs from top to bottom. A *launch* is an instruction that starts work on the device: a
fusion, a custom call (a Pallas or Triton kernel), a product, a copy, a sort. Parameters, constants,
tuples, bitcasts, the ends of asynchronous pairs, and scalars that no kernel computes launch
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator

FREE = (
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "domain",
    "get-dimension-size",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
)
FREE_CALLS = (  # custom calls that start nothing
    "AllocateBuffer",
    "ConcatBitcast",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "Sharding",
)
KERNELS_OF_ANY_SIZE = ("fusion", "custom-call", "copy")  # counted for scalars too
_BITS = {"pred": 8, "token": 0, "opaque": 0}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"\b(body|condition|to_apply|calls|called_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"\bbranch_computations=\{([^}]*)\}|\b(?:true|false)_computation=%?([\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DEVICES = re.compile(r"^HloModule .*?\b(num_partitions|replica_count)=(\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One instruction of a compiled program's text."""

    name: str
    opcode: str
    type: str
    rest: str  # operands and attributes

    @property
    def op_name(self) -> str:
        """Its origin in the traced program, such as `jit(_step)/block_1/...`."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    @property
    def call_target(self) -> str:
        """The target of a custom call; empty for other instructions."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    def called(self, attribute: str) -> str:
        """The computation named by an attribute (`body`, `condition`, `calls`, `to_apply`), or
        ""."""
        return next((name for key, name in _CALLED.findall(self.rest) if key == attribute), "")

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        names = []
        for several, one in _BRANCHES.findall(self.rest):
            names += re.findall(r"[\w.\-]+", several) if several else [one]
        return names


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A compiled program: its computations by name, its entry computation, and the number of
    devices it runs on."""

    entry: str
    computations: dict[str, list[HloInstruction]]
    num_devices: int = 1

    def instructions(self) -> Iterator[HloInstruction]:
        for computation in self.computations.values():
            yield from computation


@dataclasses.dataclass(frozen=True)
class Launches:
    """The number of launches in one run of a program, or of a part of it."""

    straight: int = 0  # outside loops of unknown length; known loops are multiplied out
    loops: int = 0  # loops whose trip count depends on the data
    in_loops: int = 0  # launches in those loops, one iteration each

    def __add__(self, other: Launches) -> Launches:
        return Launches(*map(sum, zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, int, int]:
        return dataclasses.astuple(self)


def parse_hlo(text: str) -> HloModule:
    """Parse `compiled.as_text()`.

    Raises `ValueError` where the text has no entry computation.
    """
    computations: dict[str, list[HloInstruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            type_text, rest = _split_type(found.group(2))
            if opcode := _OPCODE.match(rest):
                current.append(HloInstruction(found.group(1), opcode.group(1), type_text, rest))
    if not entry:
        raise ValueError("no ENTRY computation in the text; is it an XLA module's?")
    num_devices = _DEVICES.search(text)
    return HloModule(entry, computations, int(num_devices.group(2)) if num_devices else 1)


def _split_type(text: str) -> tuple[str, str]:
    """Split `f32[2]{0} add(...)` or `(f32[2], s32[]) while(...)` after the result's type."""
    if not text.startswith("("):
        type_text, _, rest = text.partition(" ")
        return type_text, rest
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def launches(module: HloModule, computation: str | None = None) -> Launches:
    """Count the launches of the program, or of one of its computations. The longest branch of a
    conditional counts."""
    total = Launches()
    for instruction in module.computations.get(computation or module.entry, ()):
        total += _instruction_launches(module, instruction)
    return total


def _instruction_launches(module: HloModule, instruction: HloInstruction) -> Launches:
    opcode = instruction.opcode
    if opcode == "while":
        body = launches(module, instruction.called("body"))
        body += launches(module, instruction.called("condition"))
        if (count := trip_count(instruction)) is not None:
            return Launches(count * body.straight, body.loops, body.in_loops)
        return Launches(0, 1 + body.loops, body.straight + body.in_loops)
    if opcode == "conditional":
        branches = [launches(module, name) for name in instruction.branches]
        return max(branches, key=lambda b: b.straight + b.in_loops, default=Launches())
    if opcode in ("call", "call-start", "async-start"):
        name = instruction.called("to_apply") or instruction.called("calls")
        return launches(module, name) if name else Launches()
    return Launches(straight=1) if is_launch(instruction) else Launches()


def trip_count(loop: HloInstruction) -> int | None:
    """The number of iterations of a `while`; None where the compiler does not know it."""
    known = _TRIPS.search(loop.rest)
    return int(known.group(1)) if known else None


def is_launch(instruction: HloInstruction) -> bool:
    """Whether the instruction starts work on the device."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(("-done", "-update")):
        return False
    if opcode in ("copy-start", "slice-start"):  # a transfer that overlaps with kernels
        return False
    if opcode == "custom-call":
        return instruction.call_target not in FREE_CALLS
    is_scalar = not any(dims for _, dims in _ARRAY.findall(instruction.type))
    return opcode in KERNELS_OF_ANY_SIZE or not is_scalar


def layer_kernels(module: HloModule, layer: int) -> list[dict[str, object]]:
    """The launches and loops of a layer outside loops, in order, each with its name, shape and
    operations."""
    kernels = []
    for instruction in module.computations[module.entry]:
        if f"block_{layer}/" not in instruction.op_name:
            continue
        if instruction.opcode == "while" or is_launch(instruction):
            inside = Counter(i.opcode for i in _inside(module, instruction))
            for name in (*FREE, "broadcast", "convert", "copy", "reshape", "slice", "compare"):
                inside.pop(name, None)
            kernels.append(
                {
                    "name": instruction.name,
                    "result": re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", instruction.type)[:120],
                    "op": instruction.op_name.rpartition("/")[2],
                    "inside": dict(inside.most_common()),
                }
            )
    return kernels


def _inside(module: HloModule, instruction: HloInstruction) -> Iterator[HloInstruction]:
    name = instruction.called("calls") or instruction.called("body")
    for inner in module.computations.get(name, ()):
        yield inner
        if inner.opcode in ("fusion", "while"):
            yield from _inside(module, inner)


def array_bytes(type_text: str) -> list[int]:
    """The sizes in bytes of the arrays in a type's text, in order."""
    sizes = []
    for dtype, dims in _ARRAY.findall(type_text):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits.group()) if digits else 0)
        count = math.prod(int(d) for d in dims.split(",") if d)
        sizes.append(-(-count * bits // 8))
    return sizes


def mosaic_vmem(module: HloModule) -> list[int]:
    """Bytes of VMEM that each Pallas TPU kernel uses, as the compiler annotates its call."""
    used = []
    for instruction in module.instructions():
        if instruction.call_target == "tpu_custom_call":
            noted = re.search(r'"used_scoped_memory_configs":(\[[^\]]*\])', instruction.rest)
            spaces = json.loads(noted.group(1)) if noted else []
            used.append(sum(int(s["size"]) for s in spaces if s["memory_space"] == "1"))
    return used


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """The resources that ptxas reports for a kernel."""

    kernel: str
    registers: int
    shared_bytes: int
    spill_bytes: int  # stored and loaded


def ptxas_resources(text: str) -> list[KernelResources]:
    """The resources of every kernel in the output of `ptxas -v`."""
    parts = re.split(r"Compiling entry function '([^']+)'", text)[1:]
    kernels = []
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        number = lambda pattern, part=part: sum(map(int, re.findall(pattern, part)))
        kernels.append(
            KernelResources(
                name,
                number(r"Used (\d+) registers"),
                number(r"(\d+) bytes smem"),
                number(r"(\d+) bytes spill (?:stores|loads)"),
            )
        )
    return kernels


def xla_spills(log: str) -> dict[str, int]:
    """Bytes spilled by each kernel, from the warnings that XLA logs while it compiles for a GPU."""
    spills: dict[str, int] = {}
    for line in log.splitlines():
        if "spill" in line.lower() and (name := re.search(r"function '([^']+)'", line)):
            amount = sum(map(int, re.findall(r"(\d+) bytes spill", line)))
            spills[name.group(1)] = max(spills.get(name.group(1), 0), amount)
    return {name: amount for name, amount in spills.items() if amount}


def first_reason(error: BaseException | str, limit: int = 300) -> str:
    """The first nonempty line of an error, cut to `limit` characters."""
    lines = (line.strip() for line in str(error).splitlines())
    text = next((line for line in lines if line), type(error).__name__)
    return text if len(text) <= limit else text[: limit - 3] + "..."
