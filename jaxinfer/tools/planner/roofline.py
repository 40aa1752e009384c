"""The roofline of a step: the least time that one device needs for what it must read, compute and
send, at the peak rates of its chip (S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4),
2009).

    seconds >= max(memory, compute) + links
    memory  =  (weights read + cache read) / memory_rate
    compute =  sum over number types of FLOPs / flops[type]
    links   =  sum over collectives of what a device sends / the rate of the links it takes

Every weight is read once a step. Of E experts, of which each token chooses k uniformly, T tokens
read E (1 - (1 - k / E)^T). An embedding that is not also the head is read by its rows. The cache is
read once: all tokens that a row's query may attend to, or its layer's window. FLOPs are two for
each weight of a matrix and token (for the head, each row), and 2 (H + H_v) for each query head,
token and token attended to. Collectives are those of the compiled step.

It is a bound, not a forecast: activations, launches, and the latency of each collective are left
out, and nothing overlaps with links. Links count all branches of a conditional, also those that do
not run, such as a prompt's log-probabilities; reports therefore say "about" for links, and "at
least" for the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxinfer.execution.memory import bytes_per_device
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import QuantPair, QuantWeight
from jaxinfer.sharding.zigzag import TokenSplit
from jaxinfer.tools.compile_gate.collectives import Collective
from jaxinfer.tools.compile_gate.matrix import ChipTarget
from jaxinfer.tools.compile_gate.steps import StepProgram


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The work of one device in a step, in bytes and FLOPs."""

    weight_bytes: float
    cache_bytes: float
    flops: Mapping[str, float]  # by number type


@dataclasses.dataclass(frozen=True)
class RooflineBound:
    """The terms of the formula, in seconds."""

    weights: float
    cache: float
    compute: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.weights + self.cache, self.compute) + self.links

    @property
    def limit(self) -> str:
        """The name of the largest term."""
        terms = {"memory": self.weights + self.cache, "compute": self.compute, "links": self.links}
        return max(terms, key=lambda name: terms[name])


def roofline_bound(work: StepWork, target: ChipTarget, link_seconds: float) -> RooflineBound:
    return RooflineBound(
        weights=work.weight_bytes / target.memory_rate,
        cache=work.cache_bytes / target.memory_rate,
        compute=sum(flops / flop_rate(target, kind) for kind, flops in work.flops.items()),
        links=link_seconds,
    )


def flop_rate(target: ChipTarget, kind: str) -> float:
    """The FLOP/s of a number type; a chip without units for it computes in bfloat16."""
    return target.flops.get(kind, target.flops["bfloat16"])


@dataclasses.dataclass(frozen=True)
class StepLoad:
    """The rows of a step: each adds `new` tokens, the last of which attends to `context` tokens."""

    rows: int
    new: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.new

    def seen(self, window: int | None) -> int:
        """The tokens that all queries attend to, summed."""
        lengths = range(self.context - self.new + 1, self.context + 1)
        return self.rows * sum(min(n, window or n) for n in lengths)

    def cached(self, window: int | None) -> int:
        """The cached tokens that the rows read."""
        return self.rows * min(self.context, (window or self.context) + self.new - 1)


def step_work(program: StepProgram, load: StepLoad) -> StepWork:
    """The work of one device of a pipeline's stage in one call of the step."""
    model = program.model
    layout, config = model.layout, model.local.config
    num_tokens, flops = tokens_on_a_device(program, load), dict[str, float]()
    weight_bytes = 0.0
    has_head = any("vocab" in s.axes and s.packs == "matrix" for s in model.parameters)
    for spec, weight in zip(model.parameters, program.weights, strict=True):
        num_bytes = sum(map(bytes_per_device, jax.tree.leaves(weight)))
        part = math.prod(layout.local(spec.shape, spec.array_axes))
        routed = _routed(spec, config)
        if spec.packs == "table" and has_head:
            weight_bytes += num_bytes * min(1, num_tokens / spec.dims[0])
            continue
        weight_bytes += num_bytes * (1 if routed is None else 1 - (1 - routed) ** num_tokens)
        if _is_product(spec):
            tokens = load.rows if "vocab" in spec.axes else num_tokens * (routed or 1)
            kind = _number_type(weight, program)
            flops[kind] = flops.get(kind, 0) + 2 * part * tokens
    windows = [_window(config, i) for i in range(config.num_layers)]
    per_token = program.page_bytes / program.config.cache.page_size / config.num_layers
    heads = config.num_heads / layout.parts("heads")
    cache = config.cache
    per_pair = 2 * heads * (cache.head_dim + (cache.value_dim or cache.head_dim))
    kind = program.model.model.numerics.dtype.name
    flops[kind] = flops.get(kind, 0) + per_pair * sum(map(load.seen, windows)) / layout.size("seq")
    return StepWork(weight_bytes, per_token * sum(map(load.cached, windows)), flops)


def tokens_on_a_device(program: StepProgram, load: StepLoad) -> float:
    """The tokens of a step that one device computes: the devices of a split sequence share many
    tokens, and each computes all of a few."""
    bucket = program.config.bucket_for(load.num_tokens)
    return load.num_tokens / TokenSplit.of(program.model.layout, bucket).count


def _is_product(spec: ParameterSpec) -> bool:
    """Whether a parameter is a matrix to multiply with: no norm, bias, or table of positions."""
    is_matrix = len(spec.shape) - ("stage" in spec.axes) >= 2
    return is_matrix and "position" not in spec.axes and "bias" not in spec.path


def _routed(spec: ParameterSpec, config: Any) -> float | None:
    """The share of the tokens that an expert receives; None for a parameter of no expert."""
    if "experts" not in spec.axes:
        return None
    router = config.layer(int(spec.path.split(".")[1])).experts.router
    return router.per_token / router.num_experts


def _window(config: Any, index: int) -> int | None:
    return config.layer(index).window if hasattr(config, "layer") else None


def _number_type(weight: Any, program: StepProgram) -> str:
    """The number type of a product: that of quantized activations, or else the model's."""
    first = weight.gate if isinstance(weight, QuantPair) else weight
    is_quantized = isinstance(first, QuantWeight) and first.activation_dtype is not None
    return str(first.activation_dtype) if is_quantized else program.model.model.numerics.dtype.name


def link_seconds(collectives: Iterable[Collective], target: ChipTarget) -> float:
    """The seconds of all collectives of a step, one after another."""
    return sum(c.times * _seconds(c, target) for c in collectives)


def _seconds(collective: Collective, target: ChipTarget) -> float:
    """The least seconds of one collective.

    A TPU uses all links that a chip has in its slice; the GPUs of a host use NVLink. Between hosts,
    each GPU's adapter carries its share of the traffic, or all of a permutation for a GPU whose
    neighbour is on another host.
    """
    if target.platform != "gpu":
        return collective.link_bytes / slice_rate(target)
    hosts = hosts_of_a_group(collective, target)
    if hosts == 1:
        return collective.link_bytes / target.link_rate
    assert target.network_rate is not None
    if collective.kind == "collective-permute":
        return collective.link_bytes / target.network_rate
    inside = collective.group_size // hosts
    one = dataclasses.replace(collective, group_size=inside).link_bytes if inside > 1 else 0
    across = dataclasses.replace(collective, group_size=hosts).link_bytes
    if collective.kind == "reduce-scatter":  # its result is a part of that of a host's devices
        one, across = one * hosts, across * inside
    if collective.kind not in ("all-to-all", "ragged-all-to-all"):
        across /= inside
    return one / target.link_rate + across / target.network_rate


def slice_rate(target: ChipTarget) -> float:
    """Bytes/s that a device sends, one way. On an axis of 2 chips a TPU has one link, on a longer
    axis two; the devices of a chip share them."""
    if target.platform != "tpu" or target.shape is None:
        return target.link_rate
    links = sum(min(2, size - 1) for size in target.shape)
    return target.link_rate * links / target.devices_per_chip


def hosts_of_a_group(collective: Collective, target: ChipTarget) -> int:
    """The number of hosts that the most scattered group of a collective spans. The mesh orders
    devices host by host."""
    _, per_host = target.shape or (1, 1)
    return max(len({device // per_host for device in group}) for group in collective.groups)
