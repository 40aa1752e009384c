"""Search the meshes and quantizations of a target for those that hold a model, cheapest first.

Candidates are estimated by arithmetic: weights on a device, the pages that fit next to them, and
the roofline with two sums a layer and the traffic of a split sequence. The cheapest are then
compiled until enough of them fit; the others are marked as estimates. Cheapest means fewest devices
for one replica of the engine, then the fastest decode step. The target's other devices are further
replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from jaxinfer.config import EngineConfig, MeshConfig
from jaxinfer.execution.memory import plan_pages
from jaxinfer.options import ConfigError
from jaxinfer.sharding.mesh import MeshError, divisors
from jaxinfer.sharding.rules import Layout
from jaxinfer.sharding.zigzag import TokenSplit
from jaxinfer.tools.compile_gate.collectives import Collective, groups_over
from jaxinfer.tools.compile_gate.steps import StepProgram
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.planner.models import NamedModel
from jaxinfer.tools.planner.plans import ModelPlan, decode_load, make_plan, rows_at, step_program
from jaxinfer.tools.planner.roofline import (
    RooflineBound,
    StepLoad,
    link_seconds,
    roofline_bound,
    step_work,
    tokens_on_a_device,
)

# The fraction of a device's memory for what a step needs besides weights and pages. Compiled
# presets took 0.2 (GPU) to 4 percent (TPU; docs/scaling.md); compiling corrects the estimate.
RESERVE = 0.04


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and a quantization that fit by arithmetic; figures are per replica unless they say
    otherwise."""

    config: EngineConfig
    num_devices: int
    replicas: int  # together they use all devices of the target
    weight_bytes: int
    tokens_cached: int
    rows: int
    decode: RooflineBound
    tokens_per_second: float  # of all replicas
    tokens_per_second_a_replica: float
    plan: ModelPlan | None = None  # as compiled

    @property
    def is_refused(self) -> bool:
        return self.plan is not None and not self.plan.fits


def meshes(num_devices: int, asked: MeshConfig) -> Iterator[MeshConfig]:
    """Every division of `num_devices` devices into replicas of pipe x seq x expert x tensor.
    Options of `asked` other than sizes are kept."""
    for pipe, seq, expert, tensor in itertools.product(divisors(num_devices), repeat=4):
        used = pipe * seq * expert * tensor
        if num_devices % used == 0:
            sizes = {"pipe": pipe, "seq": seq, "expert": expert, "tensor": tensor}
            mesh = dataclasses.replace(asked, data=num_devices // used, **sizes)
            if expert * tensor == 1:  # no sums: nothing to compress or to overlap
                mesh = dataclasses.replace(mesh, all_reduce="exact", overlap=False)
            yield mesh


def candidates(
    chip: Chip,
    model: NamedModel,
    config: EngineConfig,
    quantizations: Sequence[str | None],
    context: int,
) -> list[Candidate]:
    """The candidates that fit by arithmetic, cheapest first."""
    found = []
    for mesh in meshes(len(chip.devices), config.mesh):
        if mesh.expert > 1 and not _has_experts(model):
            continue
        for kind in quantizations:
            try:
                changed = dataclasses.replace(config, mesh=mesh, quantize=kind)
                candidate = estimate_candidate(chip, model, changed, context)
            except (MeshError, ConfigError):  # does not divide so, or not one page is left
                continue
            if candidate is not None:
                found.append(candidate)
    return sorted(found, key=lambda c: (c.num_devices, -c.tokens_per_second))


def estimate_candidate(
    chip: Chip, model: NamedModel, config: EngineConfig, context: int
) -> Candidate | None:
    """Estimate a candidate; None where not one request of `context` tokens fits.

    The last layer of each stage is built, and the last two; the remaining layers are assumed to
    equal the second. Raises `MeshError` where the model does not divide, and `ConfigError` where
    not one page fits.
    """
    stages, num_layers = config.mesh.pipe, model.config.num_layers
    if num_layers % stages:
        raise MeshError(f"{num_layers} layers do not make {stages} stages")
    one = step_program(chip, model.with_layers(1, stages), config)
    two = step_program(chip, model.with_layers(2, stages), config)
    more = num_layers // stages - 1
    of_all = lambda a, b: a + (b - a) * more
    weight_bytes = of_all(one.weight_bytes, two.weight_bytes)
    limit = chip.target.limit_bytes
    pages = plan_pages(
        config.cache,
        weight_bytes=weight_bytes,
        temporary_bytes=int(limit * RESERVE),
        page_bytes=one.page_bytes * (more + 1),
        min_tokens=2,
        max_tokens=config.scheduler.max_num_seqs * one.max_model_len,
        limit=limit,
    )
    rows = rows_at(one, pages, context)
    if rows == 0:
        return None
    load = decode_load(one, rows, context)
    bounds = (
        roofline_bound(
            step_work(p, load),
            chip.target,
            link_seconds(estimated_collectives(p, load), chip.target),
        )
        for p in (one, two)
    )
    terms = map(of_all, *map(dataclasses.astuple, bounds))
    least = RooflineBound(*terms)
    replicas, rate = config.mesh.data, rows / stages / least.seconds
    return Candidate(
        config,
        config.mesh.num_devices // replicas,
        replicas,
        weight_bytes,
        pages.num_tokens,
        rows,
        least,
        replicas * rate,
        rate,
    )


def estimated_collectives(program: StepProgram, load: StepLoad) -> list[Collective]:
    """The least that the layers of a stage send: two sums a layer over the devices that share its
    heads, the traffic of a split sequence, and one transfer to the next stage."""
    model = program.model
    layout, config = model.layout, model.local.config
    tokens = math.ceil(tokens_on_a_device(program, load))
    size = tokens * config.model_dim * model.local.numerics.dtype.itemsize
    found = []
    if layout.axes("heads"):
        found.append(_collective_over(layout, "heads", "all-reduce", size, 2 * config.num_layers))
    if layout.axes("page_offset"):
        found += _sequence_collectives(program, load, tokens)
    if layout.axes("stage"):
        found.append(_collective_over(layout, "stage", "collective-permute", size))
    return found


def _sequence_collectives(program: StepProgram, load: StepLoad, tokens: int) -> list[Collective]:
    """The collectives of attention over a split sequence, of all layers.

    With few tokens each device's results are merged by a maximum and two sums of float32
    (`sharding/sequence.py`). With many, new keys and values travel around a ring, then queries with
    their partial results (`sharding/ring.py`).
    """
    model = program.model
    layout, config = model.layout, model.local.config
    num_layers, n, cache = config.num_layers, layout.size("seq"), config.cache
    per_head = 4 * tokens * (config.num_heads // layout.parts("heads"))
    values = per_head * (cache.value_dim or cache.head_dim)
    of = partial(_collective_over, layout, "page_offset")
    if TokenSplit.of(layout, program.config.bucket_for(load.num_tokens)).count == 1:
        small = of("all-reduce", per_head, 2 * num_layers)
        return [of("all-reduce", values, num_layers), small]
    queries = per_head // 4 * cache.head_dim * model.local.numerics.dtype.itemsize
    # `page_bytes` counts one device's n-th part of a page.
    stored = tokens * n * program.page_bytes // (program.config.cache.page_size * num_layers)
    return [
        of("collective-permute", stored, (n - 1) * num_layers),
        of("collective-permute", queries, n * num_layers),
        of("collective-permute", values + per_head, (n + 1) * num_layers),
    ]


def _collective_over(
    layout: Layout, logical: str, kind: str, size: int, times: int = 1
) -> Collective:
    """A collective over the mesh axes that split a logical axis."""
    parts = [(axis, 1, layout.size(axis)) for axis in layout.axes(logical)]
    groups = groups_over(dict(layout.sizes), parts)
    return Collective(kind, size, len(groups[0]), times, groups=groups)


def search(
    chip: Chip,
    model: NamedModel,
    config: EngineConfig,
    quantizations: Sequence[str | None],
    context: int,
    num_compiled: int,
) -> list[Candidate]:
    """List the candidates, cheapest first, and compile a few layers of each until `num_compiled`
    fit."""
    print(
        f"trying all meshes of {len(chip.devices)} devices, by arithmetic...",
        file=sys.stderr,
        flush=True,
    )
    found = candidates(chip, model, config, quantizations, context)
    num_fitting = 0
    for i, candidate in enumerate(found):
        if num_fitting == num_compiled:
            break
        plan = make_plan(step_program(chip, model, candidate.config), context, is_whole=False)
        found[i] = dataclasses.replace(candidate, plan=plan)
        num_fitting += plan.fits
    return found


def largest_mesh(program: StepProgram) -> MeshConfig | None:
    """The mesh of all devices that splits the weights into the most parts, preferring `tensor`, and
    that the model and the engine accept; None where no mesh splits them."""
    model, config = program.named, program.config
    num_devices = program.chip.target.num_devices
    split = [
        mesh
        for mesh in meshes(num_devices, config.mesh)
        if mesh.seq == 1 < num_devices // mesh.data
        and model.config.num_layers % mesh.pipe == 0
        and (mesh.expert == 1 or _has_experts(model))
    ]
    for mesh in sorted(split, key=lambda mesh: (mesh.data, -mesh.tensor, -mesh.expert)):
        try:
            step_program(program.chip, model, dataclasses.replace(config, mesh=mesh))
        except (MeshError, ConfigError):
            continue
        return mesh
    return None


def _has_experts(model: NamedModel) -> bool:
    layers = getattr(model.config, "layers", ())
    return any(layer.experts is not None for layer in layers)
