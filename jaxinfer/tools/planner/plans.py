"""A plan: a model's step compiled for a target, whether it fits, and its best possible speed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.execution.memory import MemoryPlan
from jaxinfer.options import ConfigError
from jaxinfer.parallel.mesh_options import check_overlap, layout_of
from jaxinfer.tools.compile_gate.collectives import collectives, find_collectives
from jaxinfer.tools.compile_gate.steps import (
    DEEP,
    FEW_PAGES,
    SHALLOW,
    StepProgram,
    memory_account,
    memory_by_layers,
)
from jaxinfer.tools.compile_gate.target import Chip, Compiled
from jaxinfer.tools.compile_gate.text import first_reason, parse_hlo
from jaxinfer.tools.planner.models import NamedModel
from jaxinfer.tools.planner.options import format_mesh
from jaxinfer.tools.planner.roofline import (
    RooflineBound,
    StepLoad,
    StepWork,
    link_seconds,
    roofline_bound,
    step_work,
)


@dataclasses.dataclass(frozen=True)
class LinkTraffic:
    """What one device sends in one step, and the least time that it takes."""

    by_kind: Mapping[str, Mapping[str, float]]  # count, bytes of results, bytes sent
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """The figures of a step under a load; bytes and seconds are those of one device."""

    load: StepLoad
    bucket: int  # the compiled step's number of tokens
    work: StepWork
    traffic: LinkTraffic
    bound: RooflineBound
    # With a micro-batch in every stage, of all replicas and of one.
    tokens_per_second: float
    tokens_per_second_a_replica: float


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """The result of planning.

    `memory` is that of the largest step on one device, from the compiler's account of
    `layers_compiled` layers; it is empty, as are the figures, where the compiler gave none. Pages
    and rows are those of one replica.
    """

    fits: bool
    reason: str  # why it does not fit
    layers_compiled: int
    memory: Mapping[str, Any]
    num_pages: int = 0
    tokens_cached: int = 0
    pages_from: str = ""  # `MemoryPlan.source`
    rows: int = 0  # concurrent requests of the context's length
    decode: StepFigures | None = None
    prefill: StepFigures | None = None


def step_program(chip: Chip, model: NamedModel, config: EngineConfig) -> StepProgram:
    """Build the step to plan. Raises `MeshError` too for options that the engine refuses on the
    chip."""
    with chip.in_use():
        check_overlap(config, layout_of(config.mesh))
    return StepProgram(chip, model, config)


def make_plan(program: StepProgram, context: int, *, is_whole: bool) -> ModelPlan:
    """Compile what a plan needs.

    A few layers of the largest step give its temporaries, and so the pages that fit; with
    `is_whole` the step of all layers is then compiled with all those pages. Two depths of the
    decode step give the traffic of the remaining layers.
    """
    if program.weight_bytes > program.chip.target.limit_bytes:
        return _weights_exceed_memory(program, is_whole=is_whole)
    largest = program.config.buckets[-1]
    part = program.with_layers(DEEP)
    try:
        compiled = _compile(part, largest, 1, "the largest step")
    except jax.errors.JaxRuntimeError as error:
        return ModelPlan(False, first_reason(error), part.num_layers, {})
    try:
        pages, memory = memory_by_layers(program, part, compiled.memory())
    except ConfigError as error:
        return _refused(program, str(error))
    layers = part.num_layers
    if is_whole:
        layers = program.num_layers
        try:
            compiled = _compile(program, largest, pages.num_pages, "the largest step")
        except jax.errors.JaxRuntimeError as error:
            return ModelPlan(False, first_reason(error), layers, {})
        memory = memory_account(program, pages, compiled.memory())
    reason = "" if memory["fits"] else _exceeds_memory(memory["total"], memory["limit"])
    rows = rows_at(program, pages, context)
    if not reason and rows == 0:
        weights, temporaries = (gigabytes(memory[name]) for name in ("weights", "temporaries"))
        reason = (
            f"a request of {context:,} tokens: next to {weights} of weights and {temporaries} of "
            f"temporaries there is room for {pages.num_tokens:,} ({pages.source})"
        )
    counts = (pages.num_pages, pages.num_tokens, pages.source, rows)
    plan = ModelPlan(not reason, reason, layers, memory, *counts)
    if reason:
        return plan
    decode = decode_load(program, rows, context)
    chunk = StepLoad(1, min(largest, context), context)
    bucket = program.config.bucket_for(decode.num_tokens)
    name = "the largest step"
    of_chunk = (
        compiled_traffic(program, compiled.text)
        if is_whole
        else _step_traffic(program, largest, name)
    )
    of_decode = of_chunk
    if bucket != largest:
        of_decode = _step_traffic(program, bucket, "the decode step")
    return dataclasses.replace(
        plan,
        decode=step_figures(program, decode, of_decode, rows / program.model.num_stages),
        prefill=step_figures(program, chunk, of_chunk, chunk.num_tokens),
    )


def _compile(program: StepProgram, bucket: int, num_pages: int, what: str) -> Compiled:
    """Compile, announced on stderr because it may take minutes."""
    config, name = program.config, program.named.name
    how = f"{format_mesh(config.mesh.sizes)}, {config.quantize or config.dtype}"
    of_layers = f"{program.num_layers} layers, {bucket:,} tokens"
    text = f"compiling {what} of {name}, {of_layers} ({how})..."
    print(text, file=sys.stderr, flush=True)
    return program.compile(bucket, num_pages)


def _weights_exceed_memory(program: StepProgram, *, is_whole: bool) -> ModelPlan:
    """The plan of a model whose weights alone exceed the memory. With `is_whole` the compiler is
    asked to confirm."""
    weights, limit = gigabytes(program.weight_bytes), gigabytes(program.chip.target.limit_bytes)
    reason = f"weights of {weights} a device, which has {limit}"
    if not is_whole:
        return ModelPlan(False, reason, 0, {})
    print(f"{reason}: too much, which the compiler is asked to confirm", file=sys.stderr)
    found = _refused(program, "")
    return dataclasses.replace(found, reason=f"{reason}; {found.reason}")


def _refused(program: StepProgram, why: str) -> ModelPlan:
    """The plan of a model for which not one page fits by the account of a few layers.

    All layers are compiled with one page, for the compiler's own verdict. Where the options set the
    cache's size, `why` is returned as it is.
    """
    cache, limit = program.config.cache, program.chip.target.limit_bytes
    if why and (cache.num_pages is not None or cache.memory_bytes is not None):
        return ModelPlan(False, why, 0, {})
    try:
        compiled = _compile(program, program.config.buckets[-1], 1, "the largest step")
    except jax.errors.JaxRuntimeError as error:
        return ModelPlan(False, first_reason(error), program.num_layers, {})
    total = sum(compiled.memory().values())
    reason = _exceeds_memory(total, limit)
    if total <= limit:
        reason = (
            f"of {gigabytes(limit)} a device, weights and a step take "
            f"{gigabytes(total - program.page_bytes)}; a tenth of the rest is reserved, and "
            f"what remains holds no page of {cache.page_size} tokens"
        )
    return ModelPlan(False, reason, program.num_layers, {})


def _exceeds_memory(total: int, limit: int) -> str:
    needed = f"by the compiler's account a device needs {gigabytes(total)}"
    return f"{needed}, and has {gigabytes(limit)}"


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def rows_at(program: StepProgram, pages: MemoryPlan, context: int) -> int:
    """The number of concurrent requests of `context` tokens for which pages and slots suffice."""
    needed = -(-context // pages.page_size)
    return min(program.config.scheduler.max_num_seqs, pages.num_pages // needed)


def decode_load(program: StepProgram, rows: int, context: int) -> StepLoad:
    """The load of one micro-batch that decodes a token of each of its rows."""
    return StepLoad(-(-rows // program.model.num_stages), 1, context)


def step_figures(
    program: StepProgram, load: StepLoad, traffic: LinkTraffic, tokens: float
) -> StepFigures:
    """The figures of a step that yields `tokens` in each replica."""
    work = step_work(program, load)
    least = roofline_bound(work, program.chip.target, traffic.seconds)
    rate, bucket = tokens / least.seconds, program.config.bucket_for(load.num_tokens)
    return StepFigures(load, bucket, work, traffic, least, program.config.mesh.data * rate, rate)


def compiled_traffic(program: StepProgram, text: str) -> LinkTraffic:
    """The traffic of a compiled step."""
    module = parse_hlo(text)
    return LinkTraffic(
        collectives(module), link_seconds(find_collectives(module), program.chip.target)
    )


def _step_traffic(program: StepProgram, bucket: int, name: str) -> LinkTraffic:
    """The traffic of the step of `bucket` tokens with all layers, extrapolated from two depths:
    layers are unrolled, and each sends the same."""
    if program.chip.mesh is None:
        return LinkTraffic({}, 0.0)
    depths = (SHALLOW, DEEP)
    if program.num_layers <= DEEP * program.model.num_stages:
        return compiled_traffic(program, _compile(program, bucket, FEW_PAGES, name).text)
    parts = [program.with_layers(depth) for depth in depths]
    texts = (_compile(part, bucket, FEW_PAGES, name).text for part in parts)
    shallow, deep = (compiled_traffic(part, text) for part, text in zip(parts, texts, strict=True))
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
    return LinkTraffic(by_kind, more(shallow.seconds, deep.seconds))
