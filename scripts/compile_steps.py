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
from jaxinfer.models.decoder import DecoderConfig
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.models.llama import LLAMA
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.rope import Rope

# Two depths whose difference is layers alone: what a step does once drops out.
SHALLOW, DEEP = 2, 4
FEW_PAGES = 64
SHOWN_LAYER = 1  # neither the first nor the last of either


def decoder_config(model: dict[str, Any]) -> DecoderConfig:
    """From a table of `[models]` in the matrix."""
    values = dict(model)
    rope = Rope(values.pop("rope_theta"), values["head_dim"])
    return DecoderConfig(rope=rope, **values)


class StepProgram:
    """The step of one model under one preset, with abstract weights and state."""

    def __init__(self, chip: Chip, model: DecoderConfig, config: EngineConfig):
        self.chip = chip
        self.config = config
        numerics = Numerics(
            jnp.dtype(config.dtype), config.batch_invariant, config.attention_backend
        )
        self.model = FunctionalModel(LLAMA, model, numerics)
        self.max_len = min(model.max_len, config.max_len or model.max_len)
        self.page_bytes = kv_cache.page_bytes(
            model.num_layers,
            model.num_kv_heads,
            config.cache.page_size,
            model.head_dim,
            self.cache_dtype,
        )

    @property
    def cache_dtype(self) -> Any:
        name = self.config.cache.dtype
        return self.model.numerics.dtype if name == "model" else jnp.dtype(name)

    def compile(self, bucket: int, num_pages: int) -> Compiled:
        """The step of `bucket` tokens over a pool of `num_pages`."""
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
        return self.chip.compile(
            step.step,
            *self.chip.abstract((weights, state, packed)),
            program=step.Program(self.model, page_size=page_size, sample_tile=None),
            shape=shape,
        )


def check_step(chip: Chip, preset: str, model: dict[str, Any]) -> dict[str, Any]:
    """Compile a preset's largest step and its decode step; what they take and launch.

    As the engine does, the largest step with one page tells the temporaries, and pages get what is
    left of the target's memory (`memory.plan_pages`); the decode step is compiled with all of them.
    """
    config = load_config(preset)
    if config.dtype == "auto":
        raise ValueError(f"configs/{preset}.toml: state dtype, so that it is the same everywhere")
    shapes = decoder_config(model)
    whole = StepProgram(chip, shapes, config)
    decode_bucket = min(b for b in config.buckets if b >= config.scheduler.max_rows)

    found = launches_per_layer(chip, shapes, config, decode_bucket)
    mixed = whole.compile(config.buckets[-1], 1)
    plan = _plan(whole, mixed.memory())
    found |= {"num_pages": plan.num_pages, "tokens_cached": plan.num_tokens}
    try:
        decode = whole.compile(decode_bucket, plan.num_pages)
    except jax.errors.JaxRuntimeError as error:  # what else was found is worth having
        return found | {"status": "refused", "reason": first_reason(error)}
    module = parse(decode.text)
    return found | {
        "seconds": mixed.seconds + decode.seconds,
        "cpu_seconds": found["cpu_seconds"] + mixed.cpu_seconds + decode.cpu_seconds,
        "memory": _memory(whole, plan, mixed, decode),
        "launches": dataclasses.asdict(launches(module)),
        "collectives": collectives(module),
    }


def launches_per_layer(
    chip: Chip, model: DecoderConfig, config: EngineConfig, bucket: int
) -> dict[str, Any]:
    """What one more layer adds to the step of `bucket` tokens, and the kernels of one layer."""
    modules, cpu_seconds = [], 0.0
    for depth in (SHALLOW, DEEP):
        program = StepProgram(chip, dataclasses.replace(model, num_layers=depth), config)
        compiled = program.compile(bucket, FEW_PAGES)
        modules.append(parse(compiled.text))
        cpu_seconds += compiled.cpu_seconds
    shallow, deep = (launches(module).counts for module in modules)
    names = ("launches", "loops", "launches_in_loops")
    added = [(b - a) / (DEEP - SHALLOW) for a, b in zip(shallow, deep, strict=True)]
    return {
        "cpu_seconds": cpu_seconds,
        "per_layer": dict(zip(names, added, strict=True)),
        "layer_kernels": layer_kernels(modules[1], SHOWN_LAYER),
    }


def _plan(whole: StepProgram, memory: dict[str, int]) -> MemoryPlan:
    cache, rows = whole.config.cache, whole.config.scheduler.max_rows
    return plan_pages(
        cache,
        weight_bytes=whole.model.num_bytes,
        temporary_bytes=memory["arguments"] - whole.model.num_bytes
        + memory["results"] + memory["temporaries"] + memory["code"],
        page_bytes=whole.page_bytes,
        min_tokens=2,
        max_tokens=rows * whole.max_len,
        limit=whole.chip.target.limit_bytes,
    )  # fmt: skip


def _memory(
    whole: StepProgram, plan: MemoryPlan, mixed: Compiled, decode: Compiled
) -> dict[str, Any]:
    """Bytes of the larger of the two steps, with all pages."""
    parts = [mixed.memory(), decode.memory()]
    parts[0]["arguments"] += (plan.num_pages - 1) * whole.page_bytes
    most = max(parts, key=lambda p: sum(p.values()))
    total, limit = sum(most.values()), whole.chip.target.limit_bytes
    pages = plan.num_pages * whole.page_bytes
    return {
        "weights": whole.model.num_bytes,
        "pages": pages,
        "other_state": most["arguments"] - whole.model.num_bytes - pages,
        "results": most["results"],
        "temporaries": most["temporaries"],
        "code": most["code"],
        "total": total,
        "limit": limit,
        "fits": total <= limit,
    }
