"""What the parameters of a checkpoint's model become on the devices: `Target`.

On one device each is itself. On a mesh (`sharded_model.py`) one may be several of the model's, a
stage each, and its KV heads may be repeated; every device holds one part of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.functional import FunctionalModel, ParameterSpec

if TYPE_CHECKING:
    from jaxinfer.parallel.sharded_model import ShardedModel


@dataclasses.dataclass(frozen=True)
class Repeats:
    """The KV heads of an axis, each several times: `num_own` of them become `num_held`. `axis`
    counts from the end, so that it is that of a quantized parameter's arrays too."""

    axis: int
    num_own: int
    num_held: int

    def own_shape(self, held: tuple[int, ...]) -> tuple[int, ...]:
        shape = list(held)
        shape[self.axis] = shape[self.axis] // self.num_held * self.num_own
        return tuple(shape)

    def held_shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        shape = list(own)
        shape[self.axis] = shape[self.axis] // self.num_own * self.num_held
        return tuple(shape)

    def index(self, num_held: int) -> np.ndarray:
        """For each of `num_held` numbers along the axis, which of the model's own it is."""
        size = num_held // self.num_held
        heads = np.arange(self.num_held) * self.num_own // self.num_held
        return (heads[:, None] * size + np.arange(size)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Target:
    """A parameter as the devices hold it.

    `spec` is what all of them hold together, `sources` the model's own parameters that it is made
    of: one, or stage by stage those along its first axis if it `is_stacked`. Without a `sharding`
    it lies on the default device.
    """

    spec: ParameterSpec
    sources: tuple[ParameterSpec, ...]
    is_stacked: bool = False
    repeats: Repeats | None = None
    sharding: NamedSharding | None = None

    @property
    def nbytes(self) -> int:
        """Of what is read for it, in the model's type."""
        return sum(source.nbytes for source in self.sources)

    def repeats_of(self, array: Any) -> Repeats | None:
        """Of one of its arrays: a quantized parameter's matrices have the columns of all heads, the
        order of its inputs and the scale of x have none."""
        return self.repeats if array.ndim == len(self.sources[0].shape) else None

    @property
    def row_parts(self) -> int:
        """Into how many parts the inputs of its product are split."""
        if self.sharding is None or self.spec.packs is None:
            return 1
        names = product_axes(self.spec, self.sharding.spec)[-2]
        return math.prod(self.sharding.mesh.shape[name] for name in names)


def full_axes(split: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The axes of the mesh that split each of an array's `ndim` axes, also of those past `split`,
    which are whole."""
    named = (*split, *[None] * (ndim - len(split)))
    return [(names,) if isinstance(names, str) else tuple(names or ()) for names in named]


def product_axes(spec: ParameterSpec, split: PartitionSpec) -> list[tuple[str, ...]]:
    """`full_axes` of the parameter as its product multiplies it, [..., inputs, outputs]: a table
    has them the other way round."""
    axes = full_axes(split, len(spec.shape))
    return [*axes[:-2], axes[-1], axes[-2]] if spec.packs == "table" else axes


def targets_of(model: FunctionalModel | ShardedModel) -> tuple[Target, ...]:
    """In the order of the model's parameters."""
    if isinstance(model, FunctionalModel):
        return tuple(Target(spec, (spec,)) for spec in model.parameters)
    if model.mesh is None:
        return targets_of(model.model)
    given = {spec.path: spec for spec in model.model.parameters}
    shardings, found = model.shardings, []
    for spec, source in zip(model.parameters, model.sources, strict=True):
        repeats = None
        if source.num_kv_heads is not None:
            axis = spec.array_axes.index("kv_heads") - len(spec.shape)
            repeats = Repeats(axis, model.model.config.num_kv_heads, source.num_kv_heads)
        own = tuple(given[path] for path in source.paths)
        found.append(Target(spec, own, source.is_stacked, repeats, shardings[spec.path]))
    return tuple(found)


def own_model(model: FunctionalModel | ShardedModel) -> FunctionalModel:
    """As on one device: with the names and shapes of checkpoints."""
    return model if isinstance(model, FunctionalModel) else model.model
