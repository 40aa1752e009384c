"""A preset's whole step, compiled for a target: bytes, fit, launches a layer, collectives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from compile_target import Chip, Compiled
from compile_text import collectives, first_reason, launches, layer_kernels, parse

from jaxinfer import kv_cache, step
from jaxinfer.batch import StepShape, packed_size
from jaxinfer.config import EngineConfig, load_config
from jaxinfer.memory import MemoryPlan, plan_pages
from jaxinfer.models.decoder import DecoderConfig, LayerConfig
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.models.llama import LLAMA
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.rope import Rope

# Two depths whose difference is layers alone: what a step does once drops out.
SHALLOW, DEEP = 2, 4
FEW_PAGES = 64
VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient")
SHOWN_LAYER = 1  # neither the first nor the last of either


def decoder_config(model: dict[str, Any]) -> DecoderConfig:
    """From a table of `[models]` in the matrix."""
    values = dict(model)
    rope = Rope(values.pop("rope_theta"), values["head_dim"])
    layer = LayerConfig(rope, values.pop("ffn_dim"))
    return DecoderConfig(layers=(layer,), **values)


class StepProgram:
    """The step of one model under one preset, with abstract weights and state."""

    def __init__(self, chip: Chip, model: DecoderConfig, config: EngineConfig):
        self.chip = chip
        self.config = config
        numerics = Numerics(
            jnp.dtype(config.dtype), config.batch_invariant, config.attention_backend
        )
        self.num_layers = model.num_layers
        self.model = FunctionalModel(LLAMA, model, numerics)
        self.max_len = min(model.max_len, config.max_len or model.max_len)
        self.page_bytes = kv_cache.page_bytes(
            model.cache, page_size=config.cache.page_size, dtype=self.cache_dtype
        )

    @property
    def cache_dtype(self) -> Any:
        name = self.config.cache.dtype
        return self.model.numerics.dtype if name == "model" else jnp.dtype(name)

    def _call(self, bucket: int, num_pages: int) -> tuple[Any, dict[str, Any]]:
        """Abstract arguments and static ones of the step of `bucket` tokens."""
        rows, page_size = self.config.scheduler.max_rows, self.config.cache.page_size
        with self.chip.in_use():
            state = jax.eval_shape(
                lambda: step.initial_state(
                    self.model,
                    num_pages=num_pages,
                    page_size=page_size,
                    num_slots=rows,
                    max_len=self.max_len,
                    cache_dtype=self.cache_dtype,
                )
            )
        shape = StepShape.of_bucket(bucket, rows, page_size)
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        weights = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in self.model.parameters)
        static = {
            "program": step.Program(self.model, page_size=page_size, sample_tile=None),
            "shape": shape,
        }
        return (weights, state, packed), static

    def compile(self, bucket: int, num_pages: int) -> Compiled:
        """The step of `bucket` tokens over a pool of `num_pages`."""
        arguments, static = self._call(bucket, num_pages)
        arguments = self.chip.abstract(arguments)
        return self.chip.compile(step.step, *arguments, options=step.compiler_options, **static)

    def num_operators(self, bucket: int) -> int:
        """Operators in the step as it is written, in plain JAX: launches, if each were one."""
        arguments, static = self._call(bucket, FEW_PAGES)  # not for the chip: no kernels of its own
        return _num_operators(step.step.trace(*arguments, **static).jaxpr.jaxpr)


def check_step(chip: Chip, preset: str, model: dict[str, Any], *, is_whole: bool) -> dict[str, Any]:
    """Compile a preset's largest step, and in part its decode step; what they take and launch.

    A few layers tell the temporaries of the largest step (they do not grow with depth: layers take
    turns in the same memory), and pages get what is left of the target's memory
    (`memory.plan_pages`). With `is_whole` the whole model's largest step is then compiled with all
    those pages: the compiler itself says whether it fits. Of the decode step, one token a row, a
    few layers are compiled, which tell the launches a layer.
    """
    config = load_config(preset)
    if config.dtype == "auto":
        raise ValueError(f"configs/{preset}.toml: state dtype, so that it is the same everywhere")
    shapes = decoder_config(model)
    whole = StepProgram(chip, shapes, config)
    decode_bucket = min(b for b in config.buckets if b >= config.scheduler.max_rows)

    found = launches_per_layer(chip, shapes, config, decode_bucket)
    part = StepProgram(chip, dataclasses.replace(shapes, num_layers=DEEP), config)
    probe = part.compile(config.buckets[-1], 1)
    others = _others(part, probe.memory(), whole.num_layers)
    plan = _plan(whole, others)
    found |= {"num_pages": plan.num_pages, "tokens_cached": plan.num_tokens}
    taken = {"arguments": whole.model.num_bytes + plan.num_pages * whole.page_bytes, **others}
    taken["arguments"] += taken.pop("other_state")
    compiled, of_layers = probe, f"{DEEP} layers"
    if is_whole:
        try:
            compiled = whole.compile(config.buckets[-1], plan.num_pages)
        except jax.errors.JaxRuntimeError as error:  # what else was found is worth having
            return found | {"status": "refused", "reason": first_reason(error)}
        taken, of_layers = compiled.memory(), "all layers"
    module = parse(compiled.text)
    extra = probe if is_whole else None
    return found | {
        "seconds": found["seconds"] + compiled.seconds + (extra.seconds if extra else 0),
        "cpu_seconds": found["cpu_seconds"] + compiled.cpu_seconds
        + (extra.cpu_seconds if extra else 0),
        "compiled": of_layers,
        "memory": _memory(whole, plan, taken),
        "launches": dataclasses.asdict(launches(module)),
        "collectives": collectives(module),
    }  # fmt: skip


def _num_operators(jaxpr: Any) -> int:
    """That compute something: no views, no scalars; those of inner functions among them."""
    count = 0
    for equation in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for x in equation.params.values()]
        inner = [x for x in inner if hasattr(x, "eqns")]
        is_view = equation.primitive.name in VIEWS
        is_one = not is_view and any(v.aval.shape for v in equation.outvars)
        count += sum(map(_num_operators, inner)) if inner else is_one
    return count


def operators_per_layer(chip: Chip, model: DecoderConfig, config: EngineConfig, bucket: int) -> int:
    """What one more layer adds to the operators of the step, all of them in plain JAX: the launches
    of a layer of which nothing is fused, to hold beside `launches_per_layer`."""
    plain = dataclasses.replace(config, attention_backend="reference")
    counts = [
        StepProgram(chip, dataclasses.replace(model, num_layers=depth), plain).num_operators(bucket)
        for depth in (SHALLOW, SHALLOW + 1)
    ]
    return counts[1] - counts[0]


def launches_per_layer(
    chip: Chip, model: DecoderConfig, config: EngineConfig, bucket: int
) -> dict[str, Any]:
    """What one more layer adds to the step of `bucket` tokens, and the kernels of one layer."""
    modules, seconds, cpu_seconds = [], 0.0, 0.0
    for depth in (SHALLOW, DEEP):
        program = StepProgram(chip, dataclasses.replace(model, num_layers=depth), config)
        compiled = program.compile(bucket, FEW_PAGES)
        modules.append(parse(compiled.text))
        seconds += compiled.seconds
        cpu_seconds += compiled.cpu_seconds
    shallow, deep = (launches(module).counts for module in modules)
    names = ("launches", "loops", "launches_in_loops")
    added = [(b - a) / (DEEP - SHALLOW) for a, b in zip(shallow, deep, strict=True)]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "per_layer": dict(zip(names, added, strict=True)),
        "operators_per_layer": operators_per_layer(chip, model, config, bucket),
        "layer_kernels": layer_kernels(modules[1], SHOWN_LAYER),
    }


def _others(part: StepProgram, memory: dict[str, int], num_layers: int) -> dict[str, int]:
    """What a step takes beside weights and pages, from its first layers; code grows with depth."""
    return {
        "other_state": memory["arguments"] - part.model.num_bytes - part.page_bytes,
        "results": memory["results"],
        "temporaries": memory["temporaries"],
        "code": memory["code"] * num_layers // part.num_layers,
    }


def _plan(whole: StepProgram, others: dict[str, int]) -> MemoryPlan:
    cache, rows = whole.config.cache, whole.config.scheduler.max_rows
    return plan_pages(
        cache,
        weight_bytes=whole.model.num_bytes,
        temporary_bytes=sum(others.values()),
        page_bytes=whole.page_bytes,
        min_tokens=2,
        max_tokens=rows * whole.max_len,
        limit=whole.chip.target.limit_bytes,
    )


def _memory(whole: StepProgram, plan: MemoryPlan, parts: dict[str, int]) -> dict[str, Any]:
    """Bytes of the largest step, with all pages."""
    total, limit = sum(parts.values()), whole.chip.target.limit_bytes
    pages = plan.num_pages * whole.page_bytes
    return {
        "weights": whole.model.num_bytes,
        "pages": pages,
        "other_state": parts["arguments"] - whole.model.num_bytes - pages,
        "results": parts["results"],
        "temporaries": parts["temporaries"],
        "code": parts["code"],
        "total": total,
        "limit": limit,
        "fits": total <= limit,
    }
