"""The checks that all processes are about to run the same model in the same way."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.execution.memory import MemoryPlan
from jaxinfer.models.functional import Weights
from jaxinfer.parallel.sharded_model import ShardedModel


def agree_on_memory(
    plan: MemoryPlan,
    model: ShardedModel,
    weights: Weights,
    config: EngineConfig,
    max_model_len: int,
) -> MemoryPlan:
    """Return `plan`, made for this process's devices, with the smallest page count of all.

    Raises `HostsError` if the processes are not about to run the same model and options.
    """
    num_processes = model.peers.num_processes
    if num_processes == 1:
        return plan
    facts = collect_facts(model, weights, config, max_model_len)
    num_pages = model.peers.agree_on_pages(facts, plan.num_pages)
    source = f"{plan.source}; the smallest of {num_processes} processes"
    return dataclasses.replace(plan, num_pages=num_pages, source=source)


def collect_facts(
    model: ShardedModel, weights: Weights, config: EngineConfig, max_model_len: int
) -> dict[str, str]:
    """Return, by name, what all processes must have in common.

    These are the engine's options, the model's options, and the type and shape of each parameter
    (of a quantized one, of all its arrays).
    """
    facts = {f"config.{name}": value for name, value in _flatten(config)}
    facts["model.family"] = model.model.family.name
    facts |= {f"model.{name}": value for name, value in _flatten(model.model.config)}
    facts["max_model_len"] = str(max_model_len)
    for spec, weight in zip(model.parameters, weights, strict=True):
        arrays = [f"{a.dtype} {list(a.shape)}" for a in jax.tree.leaves(weight)]
        facts[spec.path] = ", ".join(arrays)
    return facts


def _flatten(config: Any, prefix: str = "") -> list[tuple[str, str]]:
    facts = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            facts += _flatten(value, f"{name}.")
        else:
            facts.append((name, repr(value)))
    return facts
