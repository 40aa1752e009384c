"""A plan: a model's step compiled for a target, whether it fits, and what it could do at best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from compile_collectives import collectives, find
from compile_steps import (
    DEEP,
    FEW_PAGES,
    SHALLOW,
    StepProgram,
    memory_of,
    others_of,
    plan_of,
)
from compile_text import first_reason, parse

from jaxinfer.memory import MemoryPlan
from jaxinfer.options import ConfigError
from planner.roofline import Bound, Load, Work, bound, link_seconds, work_of


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one device sends in one step, and how long that takes at the best."""

    by_kind: Mapping[str, Mapping[str, float]]  # count, bytes of results, bytes that it sends
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """A step of some load; bytes and seconds are one device's."""

    load: Load
    bucket: int  # tokens that the step is compiled for
    work: Work
    traffic: Traffic
    bound: Bound
    tokens_per_second: float  # of all replicas, with a micro-batch in every stage


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found. `memory` is of the largest step on one device, by the compiler's account of
    `layers_compiled` layers; empty, and no figures, where it gave none."""

    fits: bool
    reason: str  # why it does not
    layers_compiled: int
    memory: Mapping[str, Any]
    num_pages: int = 0
    tokens_cached: int = 0
    rows: int = 0  # requests at the context, at once
    decode: StepFigures | None = None
    prefill: StepFigures | None = None


def make_plan(program: StepProgram, context: int, *, is_whole: bool) -> Plan:
    """Compile what a plan needs. A few layers of the largest step tell its temporaries, and so the
    pages; with `is_whole` all of it is compiled then, with all those pages. Of the decode step two
    depths tell what the other layers send."""
    largest = program.config.buckets[-1]
    part = program.with_layers(DEEP)
    try:
        probe = part.compile(largest, 1)
    except jax.errors.JaxRuntimeError as error:
        return Plan(False, first_reason(error), part.num_layers, {})
    others = others_of(part, probe.memory(), program)
    try:
        pages = plan_of(program, others)
    except ConfigError:
        return _refused(program, others)
    taken = {"arguments": program.weight_bytes + pages.cache_bytes, **others}
    taken["arguments"] += taken.pop("other_state")
    compiled, layers = probe, part.num_layers
    if is_whole:
        layers = program.num_layers
        try:
            compiled = program.compile(largest, pages.num_pages)
        except jax.errors.JaxRuntimeError as error:
            return Plan(False, first_reason(error), layers, {})
        taken = compiled.memory()
    memory = memory_of(program, pages, taken)
    reason = "" if memory["fits"] else _too_much(memory["total"], memory["limit"])
    rows = rows_at(program, pages, context)
    if not reason and rows == 0:
        reason = (
            f"a request of {context:,} tokens: beside {memory['weights']:,} bytes of weights and "
            f"{memory['temporaries']:,} of temporaries there is room for {pages.num_tokens:,}"
        )
    plan = Plan(not reason, reason, layers, memory, pages.num_pages, pages.num_tokens, rows)
    if reason:
        return plan
    decode = decode_load(program, rows, context)
    chunk = Load(1, min(largest, context), context)
    bucket = _bucket(program, decode.num_tokens)
    of_chunk = traffic_of(program, compiled.text) if is_whole else _traffic(program, largest)
    of_decode = of_chunk if bucket == largest else _traffic(program, bucket)
    return dataclasses.replace(
        plan,
        decode=figures(program, decode, of_decode, rows / program.model.num_stages),
        prefill=figures(program, chunk, of_chunk, chunk.num_tokens),
    )


def _refused(program: StepProgram, others: dict[str, int]) -> Plan:
    """Not one page fits by the account of a few layers: the compiler is asked for all, with one."""
    try:
        compiled = program.compile(program.config.buckets[-1], 1)
    except jax.errors.JaxRuntimeError as error:
        return Plan(False, first_reason(error), program.num_layers, {})
    total, limit = sum(compiled.memory().values()), program.chip.target.limit_bytes
    return Plan(False, _too_much(total, limit), program.num_layers, {})


def _too_much(total: int, limit: int) -> str:
    return f"by the compiler's account a device needs {total:,} bytes, and has {limit:,}"


def rows_at(program: StepProgram, pages: MemoryPlan, context: int) -> int:
    """Requests of `context` tokens that the pages and the slots hold at once."""
    needed = -(-context // pages.page_size)
    return min(program.config.scheduler.max_rows, pages.num_pages // needed)


def decode_load(program: StepProgram, rows: int, context: int) -> Load:
    """Of one micro-batch: a token of each of its rows."""
    return Load(-(-rows // program.model.num_stages), 1, context)


def figures(program: StepProgram, load: Load, traffic: Traffic, tokens: float) -> StepFigures:
    """Of a step that yields `tokens`."""
    work = work_of(program, load)
    least = bound(work, program.chip.target, traffic.seconds)
    rate = program.config.mesh.data * tokens / least.seconds
    return StepFigures(load, _bucket(program, load.num_tokens), work, traffic, least, rate)


def _bucket(program: StepProgram, num_tokens: int) -> int:
    return min(b for b in program.config.buckets if b >= num_tokens)


def traffic_of(program: StepProgram, text: str) -> Traffic:
    """Of a compiled step as it stands."""
    module = parse(text)
    sizes = program.config.mesh.sizes
    return Traffic(collectives(module), link_seconds(find(module), program.chip.target, sizes))


def _traffic(program: StepProgram, bucket: int) -> Traffic:
    """Of the step of `bucket` tokens of all layers, from two depths: layers are unrolled, and each
    sends what another does."""
    if program.chip.mesh is None:
        return Traffic({}, 0.0)
    depths = (SHALLOW, DEEP)
    if program.num_layers <= DEEP * program.model.num_stages:
        return traffic_of(program, program.compile(bucket, FEW_PAGES).text)
    parts = [program.with_layers(depth) for depth in depths]
    shallow, deep = (traffic_of(part, part.compile(bucket, FEW_PAGES).text) for part in parts)
    layers = [part.num_layers / part.model.num_stages for part in parts]
    times = (program.num_layers / program.model.num_stages - layers[1]) / (layers[1] - layers[0])
    more = lambda a, b: b + (b - a) * times
    nothing = {"count": 0, "bytes": 0, "link_bytes": 0}
    by_kind = {
        kind: {
            name: more(shallow.by_kind.get(kind, nothing)[name], amount)
            for name, amount in totals.items()
        }
        for kind, totals in deep.by_kind.items()
    }
    return Traffic(by_kind, more(shallow.seconds, deep.seconds))
