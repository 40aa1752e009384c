"""What processes have to have in common before they run one model together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.execution.memory import MemoryPlan
from jaxinfer.models.functional import Weights
from jaxinfer.options import ConfigError
from jaxinfer.parallel.hosts.peers import Peers
from jaxinfer.sharding.mesh import spelled

if TYPE_CHECKING:
    from jaxinfer.parallel.sharded_model import ShardedModel


def check_mesh(config: EngineConfig, peers: Peers) -> None:
    """`ConfigError` for a mesh that leaves a process out, or that is not one engine's."""
    num_processes, mesh = peers.num_processes, config.mesh
    if num_processes == 1:
        return
    num_devices = jax.device_count()
    if mesh.data > 1:
        raise ConfigError(
            f"mesh.data is {mesh.data}, over {num_processes} processes: replicas are of one "
            "process. Run a server each, on hosts of its own, behind a balancer"
        )
    if mesh.num_devices != num_devices:
        sizes = spelled(mesh.sizes)
        raise ConfigError(
            f"the mesh has {mesh.num_devices} devices ({sizes or 'every axis 1'}), but the "
            f"{num_processes} processes have {num_devices} together: set mesh.tensor, mesh.expert, "
            f"mesh.pipe and mesh.seq so that their product is {num_devices}"
        )


def agreed_plan(
    plan: MemoryPlan,
    model: ShardedModel,
    weights: Weights,
    config: EngineConfig,
    max_model_len: int,
) -> MemoryPlan:
    """`plan`, made for this process's devices, with the pages that every process has room for.
    `HostsError` where the processes are not about to run the same."""
    num_processes = model.peers.num_processes
    if num_processes == 1:
        return plan
    num_pages = model.peers.agree(facts_of(model, weights, config, max_model_len), plan.num_pages)
    source = f"{plan.source}; the least of {num_processes} processes"
    return dataclasses.replace(plan, num_pages=num_pages, source=source)


def facts_of(
    model: ShardedModel, weights: Weights, config: EngineConfig, max_model_len: int
) -> dict[str, str]:
    """By name: the engine's options, the model's, and the shape and type of each parameter's
    arrays: several of a quantized one."""
    facts = {f"config.{name}": value for name, value in _flat(config)}
    facts["model.family"] = model.model.family.name
    facts |= {f"model.{name}": value for name, value in _flat(model.model.config)}
    facts["max_model_len"] = str(max_model_len)
    for spec, weight in zip(model.parameters, weights, strict=True):
        arrays = [f"{a.dtype} {list(a.shape)}" for a in jax.tree.leaves(weight)]
        facts[spec.path] = ", ".join(arrays)
    return facts


def _flat(config: Any, prefix: str = "") -> list[tuple[str, str]]:
    facts = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            facts += _flat(value, f"{name}.")
        else:
            facts.append((name, repr(value)))
    return facts
