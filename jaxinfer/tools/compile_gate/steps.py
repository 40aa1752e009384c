"""Compile a preset's step for a target: memory, fit, launches a layer, collectives.

A few layers are compiled of every preset, and all of them where the matrix says so (`is_whole`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig, MeshConfig, load_config
from jaxinfer.execution import programs
from jaxinfer.execution.batch import StepShape, packed_size
from jaxinfer.execution.compile import compiler_options
from jaxinfer.execution.memory import MemoryPlan, bytes_per_device, plan_pages
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.execution.state import Program, StateSizes
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.parallel.forward import forward_for
from jaxinfer.parallel.mesh_options import layout_of
from jaxinfer.parallel.sharded_model import ShardedModel
from jaxinfer.sharding.mesh import device_groups
from jaxinfer.tools.compile_gate.collectives import (
    collectives,
    layer_collectives,
    layer_problems,
    per_layer,
    permutes_without_work,
)
from jaxinfer.tools.compile_gate.target import Chip, Compiled
from jaxinfer.tools.compile_gate.text import first_reason, launches, layer_kernels, parse_hlo
from jaxinfer.tools.compile_gate.weights import abstract_weights
from jaxinfer.tools.planner.models import NamedModel

# Layers a stage of two programs whose difference is layers alone: what a step does once cancels.
SHALLOW, DEEP = 2, 4
FEW_PAGES = 64
VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient")
SHOWN_LAYER = 1  # neither the first nor the last of either program


class StepProgram:
    """The step of one model under one config on all devices of a chip's topology, with abstract
    weights and state.

    With replicas (`mesh.data`) it is the step of the first one. Bytes are those of one device.
    Raises `MeshError` for a mesh that does not match the devices or the model.
    """

    def __init__(self, chip: Chip, model: NamedModel, config: EngineConfig):
        self.config = config
        self.named = model
        self.num_layers = model.config.num_layers
        with chip.in_use():
            numerics = numerics_for(config)
        layout = layout_of(config.mesh)
        mesh = device_groups(config.mesh.sizes, chip.devices)[0]
        self.chip = chip.over(mesh) if layout.num_devices > 1 else chip
        whole = FunctionalModel(model.family, model.config, numerics)
        self.model = ShardedModel(whole, layout, self.chip.mesh)
        # May exceed the model's limit: `planner.options` has checked it, so that the engine warns
        # once.
        self.max_model_len = config.max_model_len or model.config.max_len
        self.weights = abstract_weights(self.chip, self.model, config.quantize)
        self.weight_bytes = sum(map(bytes_per_device, jax.tree.leaves(self.weights)))
        sizes = StateSizes.of(config, numerics, self.max_model_len)
        with self.chip.in_use():
            forward = forward_for(self.model, sizes.page_size)
            self.program = Program(forward, self.weights, sizes=sizes)
        self.page_bytes = self.program.page_bytes

    def with_layers(self, per_stage: int) -> StepProgram:
        """The same program with `per_stage` layers a stage."""
        part = self.named.with_layers(per_stage, self.model.num_stages)
        return StepProgram(self.chip, part, self.config)

    def shape(self, bucket: int) -> StepShape:
        rows, page_size = self.config.scheduler.max_num_seqs, self.config.cache.page_size
        return StepShape.of_bucket(bucket, rows, page_size)

    def _call(self, bucket: int, num_pages: int) -> tuple[Any, dict[str, Any]]:
        """The abstract arguments and the static ones of the step of `bucket` tokens."""
        with self.chip.in_use():
            state = self.program.abstract_state(num_pages)
        if self.chip.mesh is None:
            state = self.chip.abstract(state)
        shape = self.shape(bucket)
        packed = self.chip.abstract(jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32))
        return (self.weights, state, packed), {"program": self.program, "shape": shape}

    def compile(self, bucket: int, num_pages: int) -> Compiled:
        """Compile the step of `bucket` tokens over a pool of `num_pages`."""
        arguments, static = self._call(bucket, num_pages)
        return self.chip.compile(programs.step, *arguments, options=compiler_options, **static)

    def num_operators(self, bucket: int) -> int:
        """Count the operators of the step in plain JAX: its launches if nothing were fused."""
        arguments, static = self._call(bucket, FEW_PAGES)
        bare = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)  # on no chip: no kernels
        return _num_operators(
            programs.step.trace(*jax.tree.map(bare, arguments), **static).jaxpr.jaxpr
        )


def check_step(
    chip: Chip,
    preset: str,
    model: NamedModel,
    *,
    is_whole: bool,
    overrides: Sequence[str] = (),
    most_bytes: float | None = None,
) -> dict[str, Any]:
    """Compile a preset's largest step and its decode step; return their memory and launches.

    A few layers of the largest step give its temporaries and the pages that fit
    (`memory_by_layers`). With `is_whole` the largest step of all layers is then compiled with all
    those pages, so that the compiler itself decides whether it fits. Only a few layers of the
    decode step, one token a row, are compiled; they give the launches and collectives a layer. A
    step fits where it needs no more memory than the chip has, or than `most_bytes`.
    """
    config = load_config(preset, overrides)
    if config.dtype == "auto":
        raise ValueError(f"configs/{preset}.toml: state dtype, so that it is the same everywhere")
    whole = StepProgram(chip, model, config)
    found = launches_per_layer(whole)
    part = whole.with_layers(DEEP)
    compiles = [part.compile(config.buckets[-1], 1)]
    plan, memory = memory_by_layers(whole, part, compiles[0].memory())
    found |= {"num_pages": plan.num_pages, "tokens_cached": plan.num_tokens}
    if is_whole:
        try:
            compiles.append(whole.compile(config.buckets[-1], plan.num_pages))
        except jax.errors.JaxRuntimeError as error:  # keep the other findings
            return found | {"status": "refused", "reason": first_reason(error)}
        memory = memory_account(whole, plan, compiles[-1].memory())
    if most_bytes is not None:
        memory |= {"limit": int(most_bytes), "fits": memory["total"] <= most_bytes}
    module = parse_hlo(compiles[-1].text)
    crossing = layer_collectives(module, SHOWN_LAYER)
    found["per_layer"]["collectives_of_largest"] = sum(kind["count"] for kind in crossing.values())
    found["per_layer"]["permutes_without_work"] = permutes_without_work(module, SHOWN_LAYER)
    found["collective_problems"] += [
        f"{problem} (of {config.buckets[-1]} tokens)"
        for problem in _collective_problems(whole, crossing)
    ]
    return found | {
        "seconds": found["seconds"] + sum(c.seconds for c in compiles),
        "cpu_seconds": found["cpu_seconds"] + sum(c.cpu_seconds for c in compiles),
        "compiled": "all layers" if is_whole else f"{part.num_layers} layers",
        "memory": memory,
        "launches": dataclasses.asdict(launches(module)),
        "collectives": collectives(module),
    }


def _num_operators(jaxpr: Any) -> int:
    """Count the operators that compute something, those of inner functions included; views and
    scalars do not count."""
    count = 0
    for equation in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for x in equation.params.values()]
        inner = [x for x in inner if hasattr(x, "eqns")]
        is_view = equation.primitive.name in VIEWS
        is_one = not is_view and any(v.aval.shape for v in equation.outvars)
        count += sum(map(_num_operators, inner)) if inner else is_one
    return count


def operators_per_layer(whole: StepProgram, bucket: int) -> int:
    """The operators that one more layer adds to the step on one device in plain JAX: a layer's
    launches if nothing were fused, for comparison with `launches_per_layer`."""
    plain = dataclasses.replace(
        whole.config, attention_backend="reference", mesh=MeshConfig(), quantize=None
    )
    chip = whole.chip.alone()
    one = StepProgram(chip, whole.named, plain)
    counts = [one.with_layers(depth).num_operators(bucket) for depth in (SHALLOW, SHALLOW + 1)]
    return counts[1] - counts[0]


def launches_per_layer(whole: StepProgram) -> dict[str, Any]:
    """The launches that one more layer adds to a device's decode step, and the kernels of a
    layer."""
    config = whole.config
    rows = -(-config.scheduler.max_num_seqs // whole.model.num_stages)
    bucket = config.bucket_for(rows)
    modules, seconds, cpu_seconds = [], 0.0, 0.0
    for depth in (SHALLOW, DEEP):
        compiled = whole.with_layers(depth).compile(bucket, FEW_PAGES)
        modules.append(parse_hlo(compiled.text))
        seconds += compiled.seconds
        cpu_seconds += compiled.cpu_seconds
    shallow, deep = (launches(module).counts for module in modules)
    names = ("launches", "loops", "launches_in_loops")
    added = [(b - a) / (DEEP - SHALLOW) for a, b in zip(shallow, deep, strict=True)]
    crossing = per_layer(modules[0], modules[1], DEEP - SHALLOW)
    counts: dict[str, float] = dict(zip(names, added, strict=True))
    counts["collectives"] = sum(kind["count"] for kind in crossing.values())
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "per_layer": counts,
        "collectives_per_layer": crossing,
        "collective_problems": _collective_problems(whole, crossing),
        "operators_per_layer": operators_per_layer(whole, bucket),
        "layer_kernels": layer_kernels(modules[1], SHOWN_LAYER),
    }


def _collective_problems(whole: StepProgram, crossing: dict[str, Any]) -> list[str]:
    """Check the collectives of a layer under plain tensor parallelism: no experts, heads split,
    tokens not split, exact sums without overlap. Other layers are held to their budgets."""
    layout = whole.model.layout
    is_plain = layout.all_reduce == "exact" and not layout.overlaps and layout.size("seq") == 1
    has_experts = any("experts" in spec.axes for spec in whole.model.parameters)
    if layout.parts("heads") == 1 or not is_plain or has_experts:
        return []
    is_parallel = getattr(whole.named.config, "residual", "") == "parallel"
    return layer_problems(crossing, is_parallel=is_parallel)


def memory_by_layers(
    whole: StepProgram, part: StepProgram, memory: dict[str, int]
) -> tuple[MemoryPlan, dict[str, Any]]:
    """Extrapolate from `memory`, that of `part` (a few layers, one page), to the whole model.

    Returns the pages that fit and the bytes of the largest step with all of them
    (`memory_account`). Raises `ConfigError` where not one request fits. Code grows with depth.
    Temporaries hardly do, since layers reuse the same memory: those of llama31_70b_v5e16 take 0.16
    GiB at 4 layers a stage and 0.26 at all 80.
    """
    other_state = memory["arguments"] - part.weight_bytes - part.page_bytes
    others = memory | {"code": memory["code"] * whole.num_layers // part.num_layers}
    others["arguments"] = other_state
    plan = plan_pages(
        whole.config.cache,
        weight_bytes=whole.weight_bytes,
        temporary_bytes=sum(others.values()),
        page_bytes=whole.page_bytes,
        min_tokens=2,
        max_tokens=whole.config.scheduler.max_num_seqs * whole.max_model_len,
        limit=whole.chip.target.limit_bytes,
    )
    arguments = whole.weight_bytes + plan.cache_bytes + other_state
    return plan, memory_account(whole, plan, others | {"arguments": arguments})


def memory_account(whole: StepProgram, plan: MemoryPlan, parts: dict[str, int]) -> dict[str, Any]:
    """Bytes of the largest step on one device, with all pages, as the compiler reports them."""
    total, limit = sum(parts.values()), whole.chip.target.limit_bytes
    pages = plan.cache_bytes
    return {
        "weights": whole.weight_bytes,
        "pages": pages,
        "other_state": parts["arguments"] - whole.weight_bytes - pages,
        "results": parts["results"],
        "temporaries": parts["temporaries"],
        "code": parts["code"],
        "total": total,
        "limit": limit,
        "fits": total <= limit,
    }
