"""The roofline of a step: the least time that one device needs for what it must read, compute and
send, at the peak rates of its chip (S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4),
2009).

    seconds >= max(memory, compute) + links
    memory  =  (weights read + cache read) / memory_rate
    compute =  sum over number types of FLOPs / flops[type]
    links   =  sum over collectives of what a device sends / the rate of the links it takes

Every weight is read once a step; of E experts, of which a token takes k, so many as T tokens that
choose alike often meet: E (1 - (1 - k / E)^T). Of an embedding that is no head the rows are read.
The cache is read once: all that a row's query may see, or its layer's window. FLOPs are two for
each weight of a product and token (of the head, and row), and 2 (H + H_v) for each query head,
token and token seen. Collectives are those of the compiled step.

It is a bound, not a forecast: activations, launches, and the latency of each collective are left
out, and nothing is said to overlap with links. Of a conditional, links are of all branches, also of
those that do not run (a prompt's log-probabilities, say): "about", where the rest is "at least".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxinfer.execution.memory import bytes_on_a_device
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import QuantPair, QuantWeight
from jaxinfer.sharding.zigzag import TokenSplit
from jaxinfer.tools.compile_gate.collectives import Collective
from jaxinfer.tools.compile_gate.matrix import ChipTarget
from jaxinfer.tools.compile_gate.steps import StepProgram


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one device does in a step; bytes and FLOPs."""

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
        """What takes longest."""
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
    """A chip without units for a number type computes in the wider one."""
    return target.flops.get(kind, target.flops["bfloat16"])


@dataclasses.dataclass(frozen=True)
class StepLoad:
    """The rows of a step: each brings `new` tokens, the last of which sees `context` tokens."""

    rows: int
    new: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.new

    def seen(self, window: int | None) -> int:
        """Tokens seen by all queries together."""
        lengths = range(self.context - self.new + 1, self.context + 1)
        return self.rows * sum(min(n, window or n) for n in lengths)

    def cached(self, window: int | None) -> int:
        """Tokens of cache that the rows read."""
        return self.rows * min(self.context, (window or self.context) + self.new - 1)


def step_work(program: StepProgram, load: StepLoad) -> StepWork:
    """Of one device of a pipeline's stage, in one call of the step."""
    model = program.model
    layout, config = model.layout, model.local.config
    num_tokens, flops = tokens_on_a_device(program, load), dict[str, float]()
    weight_bytes = 0.0
    has_head = any("vocab" in s.axes and s.packs == "matrix" for s in model.parameters)
    for spec, weight in zip(model.parameters, program.weights, strict=True):
        held = sum(map(bytes_on_a_device, jax.tree.leaves(weight)))
        part = math.prod(layout.local(spec.shape, spec.array_axes))
        routed = _routed(spec, config)
        if spec.packs == "table" and has_head:
            weight_bytes += held * min(1, num_tokens / spec.dims[0])
            continue
        weight_bytes += held * (1 if routed is None else 1 - (1 - routed) ** num_tokens)
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
    """A sequence's devices share a step's tokens, but few of them every device has all."""
    bucket = program.config.bucket_for(load.num_tokens)
    return load.num_tokens / TokenSplit.of(program.model.layout, bucket).count


def _is_product(spec: ParameterSpec) -> bool:
    """Norms and biases are none, nor is a table of positions."""
    is_matrix = len(spec.shape) - ("stage" in spec.axes) >= 2
    return is_matrix and "position" not in spec.axes and "bias" not in spec.path


def _routed(spec: ParameterSpec, config: Any) -> float | None:
    """Of experts: which part of the tokens takes one."""
    if "experts" not in spec.axes:
        return None
    router = config.layer(int(spec.path.split(".")[1])).experts.router
    return router.per_token / router.num_experts


def _window(config: Any, index: int) -> int | None:
    return config.layer(index).window if hasattr(config, "layer") else None


def _number_type(weight: Any, program: StepProgram) -> str:
    """In which a product is computed: where activations are quantized, as they are."""
    first = weight.gate if isinstance(weight, QuantPair) else weight
    is_quantized = isinstance(first, QuantWeight) and first.activation_dtype is not None
    return str(first.activation_dtype) if is_quantized else program.model.model.numerics.dtype.name


def link_seconds(collectives: Iterable[Collective], target: ChipTarget) -> float:
    """Of all collectives of a step, one after another."""
    return sum(c.times * _seconds(c, target) for c in collectives)


def _seconds(collective: Collective, target: ChipTarget) -> float:
    """One collective at the best: on a TPU over all links that a chip has in its slice; between
    GPUs of a host over NVLink; over hosts each GPU's adapter carries its share of what must cross,
    and of a permutation, for the GPU whose neighbour is on another host, all.
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
    if collective.kind == "reduce-scatter":  # its result is a part of what a host's devices hold
        one, across = one * hosts, across * inside
    if collective.kind not in ("all-to-all", "ragged-all-to-all"):
        across /= inside
    return one / target.link_rate + across / target.network_rate


def slice_rate(target: ChipTarget) -> float:
    """Bytes/s that leave a device one way: a TPU's axis of 2 chips has one link between them, a
    longer one two at each chip; the devices of a chip share them."""
    if target.platform != "tpu" or target.shape is None:
        return target.link_rate
    links = sum(min(2, size - 1) for size in target.shape)
    return target.link_rate * links / target.devices_per_chip


def hosts_of_a_group(collective: Collective, target: ChipTarget) -> int:
    """Over how many hosts the most scattered of its groups goes. Devices lie host by host, in the
    order of the mesh."""
    _, per_host = target.shape or (1, 1)
    return max(len({device // per_host for device in group}) for group in collective.groups)
