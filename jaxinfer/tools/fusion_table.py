"""Compare what XLA fuses by itself with a fused kernel, from the compiled text for each chip.

    python scripts/fusion_table.py --write=docs/fusion.md
    python scripts/fusion_table.py --targets=v5e,h100 --show=h100/add_rms_norm/64

An operator is placed between the products that surround it in a model, since a compiler's fusion
depends on them. Each program is compiled twice, with the operator's plain form and with its kernel,
and two figures are read from the text: the launches, and the bytes that they read and write in the
chip's memory, less each argument once and each result once. Arrays that a TPU's compiler keeps in
VMEM between two launches cost none.

Needs the environment of `make compile-check`. Nothing runs: the table shows bytes, not time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from jaxinfer.kernels.add_norm import add_layer_norm, add_rms_norm
from jaxinfer.kernels.gated_mlp import gated_mlp
from jaxinfer.tools.compile_gate.matrix import choose, load_target, target_names
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import (
    HloInstruction,
    HloModule,
    array_bytes,
    first_reason,
    launches,
    parse_hlo,
)

FLAGS = flags.FLAGS
TARGETS = flags.DEFINE_string(
    "targets", "all", "Chips: all, or names of jaxinfer/tools/targets/*.toml."
)
WRITE = flags.DEFINE_string("write", None, "Put the table into this document, between its marks.")
SHOW = flags.DEFINE_string("show", None, "Print the launches of one program: target/operator/T.")

TOKENS = (64, 2048)  # a decode step, a prefill chunk
MODEL_DIM, FFN_DIM, EPS = 4096, 14336, 1e-5  # Llama-3-8B
MARKS = ("<!-- table: scripts/fusion_table.py -->", "<!-- end of table -->")
TRANSFERS = ("copy-start", "slice-start")  # overlap with kernels; they are no launches
FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")
IN_VMEM = re.compile(r"S\(\d+\)")
ARRAY = re.compile(r"\b[a-z]+[0-9]*[a-z0-9]*\[[0-9,]*\](?:\{[^{}]*\})?")
OPERANDS = re.compile(r"%([\w.\-]+)")

Arrays = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Operator:
    """A program around an operator; `program(backend, **arrays)` returns its results."""

    name: str
    program: Callable[..., Any]
    arrays: Callable[[int], Arrays]


@dataclasses.dataclass(frozen=True)
class Cost:
    launches: int
    bytes: int  # less each argument and result once

    def __str__(self) -> str:
        return f"{self.launches} | {self.bytes / 2**20:.2f}"


def _spec(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _norm_arrays(T: int, dtype: Any = jnp.bfloat16) -> Arrays:
    """Attention's output projection, the norm, and a projection of the next block."""
    D = MODEL_DIM
    return {
        "x": _spec(T, D),
        "first": _spec(D, D),
        "residual": _spec(T, D),
        "weight": _spec(D),
        "second": _spec(D, D, dtype=dtype),
    }


def _add_rms_norm(backend, *, x, first, residual, weight, second):
    out, total = add_rms_norm(x @ first, residual, weight, eps=EPS, backend=backend)
    return out @ second, total


def _add_layer_norm(backend, *, x, first, residual, weight, second):
    out, total = add_layer_norm(x @ first, residual, weight, None, eps=EPS, backend=backend)
    return out @ second, total


def _add_rms_norm_int8(backend, *, x, first, residual, weight, second):
    (values, scales), total = add_rms_norm(
        x @ first, residual, weight, eps=EPS, quantize="int8", backend=backend
    )
    product = jax.lax.dot(values, second, preferred_element_type=jnp.int32)
    return (product.astype(jnp.float32) * scales).astype(x.dtype), total


def _gated_mlp(backend, *, x, gate_up, down):
    return gated_mlp(x, gate_up, activation="silu", backend=backend) @ down


def _gated_arrays(T: int) -> Arrays:
    D, F = MODEL_DIM, FFN_DIM
    return {"x": _spec(T, D), "gate_up": _spec(2, D, F), "down": _spec(F, D)}


OPERATORS = (
    Operator("add_rms_norm", _add_rms_norm, _norm_arrays),
    Operator("add_layer_norm", _add_layer_norm, _norm_arrays),
    Operator("add_rms_norm, int8", _add_rms_norm_int8, lambda T: _norm_arrays(T, jnp.int8)),
    Operator("gated_mlp", _gated_mlp, _gated_arrays),
)


def compiled_text(chip: Chip, operator: Operator, T: int, backend: str) -> str:
    function = jax.jit(lambda arrays: operator.program(backend, **arrays))
    return chip.compile(function, chip.abstract(operator.arrays(T))).text


def memory_bytes(type_text: str) -> int:
    """The bytes of a type's arrays that are in the chip's memory."""
    found = ARRAY.findall(type_text)
    return sum(sum(array_bytes(array)) for array in found if not IN_VMEM.search(array))


def _operands(instruction: HloInstruction) -> list[str]:
    """The distinct operand names: a kernel gets one array in place of all that it does not read."""
    text = instruction.rest
    start = text.index("(", text.index(instruction.opcode))
    depth, end = 0, start
    for end in range(start, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if depth == 0:
            break
    return list(dict.fromkeys(OPERANDS.findall(text[start:end])))


def traffic(module: HloModule) -> Iterator[tuple[HloInstruction, int]]:
    """The entry's instructions that touch the chip's memory, and the bytes they read and write."""
    instructions = module.computations[module.entry]
    types = {instruction.name: instruction.type for instruction in instructions}
    for instruction in instructions:
        if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
            continue
        read = sum(memory_bytes(types[name]) for name in _operands(instruction) if name in types)
        written = instruction.type
        if instruction.opcode in TRANSFERS:  # (what is written, what is read, a counter)
            written = ARRAY.search(written).group()  # type: ignore[union-attr]
        yield instruction, read + memory_bytes(written)


def cost_of(text: str, operator: Operator, T: int) -> Cost:
    module = parse_hlo(text)
    arguments = operator.arrays(T)
    results = jax.eval_shape(lambda arrays: operator.program("reference", **arrays), arguments)
    least = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((arguments, results)))
    total = sum(amount for _, amount in traffic(module))
    return Cost(launches(module).straight, total - least)


def verdict(plain: Cost, kernel: Cost | str) -> str:
    """Compare by launches and bytes; 2 % of the bytes count as no difference."""
    if isinstance(kernel, str):
        return f"XLA: {kernel}"
    bytes_saved = plain.bytes - kernel.bytes
    is_even = abs(bytes_saved) <= 0.02 * max(plain.bytes, kernel.bytes)
    signs = {_sign(plain.launches - kernel.launches), 0 if is_even else _sign(bytes_saved)}
    if signs == {0}:
        return "no difference: XLA"
    if -1 not in signs:
        return "kernel"
    return "XLA" if 1 not in signs else "fewer of one, more of the other"


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def rows_of(name: str) -> Iterator[str]:
    """The table's rows of a target."""
    target = load_target(name)
    chip = Chip(target)
    for operator in OPERATORS:
        for T in TOKENS:
            plain = cost_of(compiled_text(chip, operator, T, "xla"), operator, T)
            kernel: Cost | str
            try:
                kernel = cost_of(compiled_text(chip, operator, T, target.platform), operator, T)
            except NotImplementedError as why:
                kernel = first_reason(why, 60)
            of_kernel = "- | -" if isinstance(kernel, str) else str(kernel)
            better = verdict(plain, kernel)
            yield f"| {name} | {operator.name} | {T} | {plain} | {of_kernel} | {better} |"


def table(names: list[str]) -> str:
    head = "target | operator | T | launches XLA | MiB XLA | launches kernel | MiB kernel | better"
    lines = [f"| {head} |", "|" + " --- |" * (head.count("|") + 1)]
    for name in names:
        for row in rows_of(name):
            print(row, flush=True)
            lines.append(row)
    return "\n".join(lines)


def show(place: str) -> None:
    """The launches of both programs and their bytes."""
    name, operator_name, T = place.split("/")
    target = load_target(name)
    operator = next(o for o in OPERATORS if o.name == operator_name)
    for backend in ("xla", target.platform):
        text = compiled_text(Chip(target), operator, int(T), backend)
        print(f"{backend}: {cost_of(text, operator, int(T))}")
        for instruction, amount in traffic(parse_hlo(text)):
            print(f"  {amount / 2**20:8.2f}  {instruction.opcode:12} {instruction.type[:100]}")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if SHOW.value:
        show(SHOW.value)
        return
    found = table(choose("targets", TARGETS.value, target_names()))
    if WRITE.value:
        path = Path(WRITE.value)
        before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        path.write_text(f"{before}{MARKS[0]}\n\n{found}\n\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
