"""A model on a mesh: what each device computes with, and how weights and pages are laid out.

A step is one program that all devices run on their own parts (`jax.shard_map`, manual over every
axis). `ShardedModel.local` is the model of such a part: the layers of one stage, built with the
layout, so that every parameter has one device's dimensions. Without a mesh it is the model itself.

Three things make a model divisible that is not so by itself:

* If there are fewer KV heads than parts of the heads, KV heads are repeated, so that each part has
  those that its heads read, and the pages are split by their heads.
* The stages of a pipeline have the same arrays, stacked: parameter `blocks.l.x` is [S, ...], and
  its part s belongs to layer `s * L / S + l`.
* If sequences are split, each device of `seq` stores its part of every page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import EngineConfig
from jaxinfer.models.functional import FunctionalModel, ParameterSpec, Weights
from jaxinfer.nn.ragged import CacheShape
from jaxinfer.options import ConfigError
from jaxinfer.parallel.hosts.peers import ALONE, Peers
from jaxinfer.parallel.mesh_options import (
    check_overlap,
    check_processes,
    layout_of,
    page_part_size,
)
from jaxinfer.sharding.mesh import MeshError, device_groups, divisors, suggest_sizes
from jaxinfer.sharding.rules import ONE_DEVICE, Layout

BLOCKS = "blocks"
REPLICATED = PartitionSpec()  # split over no axis: the same on every device


class Source(NamedTuple):
    """Where a parameter's array comes from: the parameters of the model on one device (one for each
    stage if they are stacked), and the number of KV heads after repetition."""

    paths: tuple[str, ...]
    is_stacked: bool
    num_kv_heads: int | None  # None: it has no KV heads, or they are not repeated


class ShardedModel:
    """`model`, split by `layout` over `mesh`; `peers` are the processes that the devices belong to.

    Raises `MeshError` for a model that does not divide so.
    """

    def __init__(
        self,
        model: FunctionalModel,
        layout: Layout = ONE_DEVICE,
        mesh: Mesh | None = None,
        peers: Peers = ALONE,
    ):
        self.model = model
        self.peers = peers
        self.layout = layout
        self.mesh = mesh
        self.num_stages = layout.size("pipe")
        self.local = self._local()
        if self.num_stages > 1:
            self._check_stages()
        given = {spec.path: spec for spec in model.parameters}
        self.sources = tuple(self._source(spec, given) for spec in self.local.parameters)
        self.parameters = tuple(
            self._parameter(source, given, local.path)
            for source, local in zip(self.sources, self.local.parameters, strict=True)
        )

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each parameter's array, by its path. Only on a mesh."""
        assert self.mesh is not None
        return {
            spec.path: NamedSharding(self.mesh, self.layout.spec(spec.array_axes))
            for spec in self.parameters
        }

    @property
    def cache(self) -> CacheShape:
        """What one device stores of a token whose place in the page it has."""
        shape = self.local.config.cache
        return shape._replace(num_kv_heads=shape.num_kv_heads // self._kv_parts())

    @property
    def page_spec(self) -> tuple[PartitionSpec, PartitionSpec]:
        """The specs of a layer's pages [P, K, rows, lanes] and of their scales [P, K, B].

        Each stage has P pages of its own, one after another in the array.
        """
        heads = self.layout.axes("kv_heads") if self._kv_parts() > 1 else ()
        axes = (self.layout.axes("stage"), heads, self.layout.axes("page_offset"))
        split = tuple(axis or None for axis in axes)
        return PartitionSpec(*split, None), PartitionSpec(*split)

    def _local(self) -> FunctionalModel:
        model, layout, S = self.model, self.layout, self.num_stages
        if self.mesh is None:
            return model
        config, changes = model.config, {}
        if config.num_layers % S:
            raise MeshError(
                f"the model has {config.num_layers} layers, which pipe {S} does not divide; "
                f"{suggest_sizes(divisors(config.num_layers))}"
            )
        if S > 1:
            changes["num_layers"] = config.num_layers // S
        if self._repeats_kv_heads():
            changes["num_kv_heads"] = self._num_kv_heads()
        numerics = dataclasses.replace(model.numerics, layout=layout)
        config = dataclasses.replace(config, **changes) if changes else config
        return FunctionalModel(model.family, config, numerics)

    @property
    def _is_latent(self) -> bool:
        """Whether all heads read one key (latent attention), which every device stores."""
        return getattr(self.model.config, "latent", None) is not None

    def _repeats_kv_heads(self) -> bool:
        """Whether KV heads can be repeated. GPT-like models have as many of them as heads."""
        return hasattr(self.model.config, "num_kv_heads") and not self._is_latent

    def _num_kv_heads(self) -> int:
        """The number of KV heads after repetition: one for each run of heads, within a device's
        part, that read the same KV head."""
        config, parts = self.model.config, self.layout.parts("heads")
        if parts != self.layout.parts("kv_heads"):
            raise MeshError("heads and kv_heads are split together: name both in mesh.whole")
        self.layout.local((config.num_heads,), ("heads",), "attention")
        group = config.num_heads // config.num_kv_heads
        return config.num_heads // math.gcd(group, config.num_heads // parts)

    def _kv_parts(self) -> int:
        return 1 if self._is_latent else self.layout.parts("kv_heads")

    def _source(self, local: ParameterSpec, given: dict[str, ParameterSpec]) -> Source:
        paths = (local.path,)
        head, _, rest = local.path.partition(".")
        is_stacked = self.num_stages > 1 and head == BLOCKS
        if is_stacked:
            index, _, rest = rest.partition(".")
            per_stage = self.local.config.num_layers
            paths = tuple(
                f"{BLOCKS}.{stage * per_stage + int(index)}.{rest}"
                for stage in range(self.num_stages)
            )
        has_kv_heads = "kv_heads" in given[paths[0]].axes and self._repeats_kv_heads()
        wanted = self.local.config.num_kv_heads if has_kv_heads else None
        is_same = wanted == getattr(self.model.config, "num_kv_heads", None)
        return Source(paths, is_stacked, None if is_same else wanted)

    def _parameter(
        self, source: Source, given: dict[str, ParameterSpec], path: str
    ) -> ParameterSpec:
        """The parameter as all devices of the mesh have it together."""
        spec, repeated = given[source.paths[0]], source.num_kv_heads
        if repeated is not None:
            num_kv_heads = self.model.config.num_kv_heads
            longer = lambda sizes, axes: tuple(
                n * repeated // num_kv_heads if axis == "kv_heads" else n
                for n, axis in zip(sizes, axes, strict=True)
            )
            shape, dims = longer(spec.shape, spec.array_axes), longer(spec.dims, spec.axes)
            spec = dataclasses.replace(spec, shape=shape, dims=dims)
        if source.is_stacked:
            S = self.num_stages
            shape, dims = (S, *spec.shape), (S, *spec.dims)
            spec = dataclasses.replace(spec, shape=shape, dims=dims, axes=("stage", *spec.axes))
        return dataclasses.replace(spec, path=path)

    def _check_stages(self) -> None:
        """Raise `MeshError` if a layer is not built like those it is stacked with.

        All stages run one program.
        """
        model, num_layers = self.model, self.model.config.num_layers
        abstract: Any = nnx.eval_shape(lambda: model.family.build(model.config, model.numerics))
        layer_config: Callable[[int], Any] = getattr(model.config, "layer", lambda index: None)
        built = [(nnx.split(abstract.blocks[i])[0], layer_config(i)) for i in range(num_layers)]

        def first_unlike(per_stage: int) -> int | None:
            unlike = (i for i in range(num_layers) if built[i] != built[i % per_stage])
            return next(unlike, None)

        per_stage = self.local.config.num_layers
        if (index := first_unlike(per_stage)) is None:
            return
        fitting = [n for n in divisors(num_layers) if first_unlike(num_layers // n) is None]
        raise MeshError(
            f"pipe is {self.num_stages}, so that layer {index} is stacked with layer "
            f"{index % per_stage}, but they are built differently (another window, RoPE, MLP or "
            f"norm); {suggest_sizes(fitting)}"
        )


def sharded_for(model: FunctionalModel, config: EngineConfig) -> ShardedModel:
    """Return `model` on the mesh of `config`, over this process's devices.

    Raises `ConfigError` if the mesh does not fit the devices or the model, or asks for replicas,
    which are several engines (`parallel/replicas.py`).
    """
    if config.mesh.data > 1:
        raise ConfigError(
            f"mesh.data is {config.mesh.data}: an engine is one replica of them; use jaxinfer.LLM, "
            "or set mesh.data to 1"
        )
    return sharded_replicas(model, config)[0]


def sharded_replicas(
    model: FunctionalModel, config: EngineConfig, peers: Peers = ALONE
) -> list[ShardedModel]:
    """Return `model` for each of the `config.mesh.data` replicas, on devices of its own. With
    several processes there is one, on all devices."""
    check_processes(config, peers)
    try:
        layout = layout_of(config.mesh)
        page_part_size(config.cache.page_size, layout)
        check_overlap(config, layout)
        if config.mesh.num_devices == 1:
            return [ShardedModel(model, layout)]
        meshes = device_groups(config.mesh.sizes)
        return [ShardedModel(model, layout, mesh, peers) for mesh in meshes]
    except MeshError as error:
        raise ConfigError(str(error)) from error


def unstacked(weights: Sequence[Any], model: ShardedModel) -> Weights:
    """Return one device's parts as the weights of `model.local`; call it inside `shard_map`."""
    return tuple(
        jax.tree.map(lambda a: a[0], weight) if source.is_stacked else weight
        for weight, source in zip(weights, model.sources, strict=True)
    )
