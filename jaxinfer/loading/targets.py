"""Map the parameters of a checkpoint's model to the arrays on the devices: `LoadTarget`.

On one device, each array is one parameter. On a mesh (`sharded_model.py`), an array may stack
several parameters, one for each pipeline stage, and its KV heads may be repeated; every device has
one slice of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.functional import FunctionalModel, ParameterSpec
from jaxinfer.parallel.sharded_model import ShardedModel


@dataclasses.dataclass(frozen=True)
class HeadRepeats:
    """Repetition of the KV heads along an axis: `num_stored` heads become `num_repeated`.

    `axis` is negative, so that it also names the axis of a quantized parameter's arrays.
    """

    axis: int
    num_stored: int
    num_repeated: int

    def stored_shape(self, repeated: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape before repetition."""
        shape = list(repeated)
        shape[self.axis] = shape[self.axis] // self.num_repeated * self.num_stored
        return tuple(shape)

    def repeated_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape after repetition."""
        shape = list(stored)
        shape[self.axis] = shape[self.axis] // self.num_stored * self.num_repeated
        return tuple(shape)

    def stored_indices(self, size: int) -> np.ndarray:
        """Return the stored index of each of the `size` repeated positions along the axis."""
        head_size = size // self.num_repeated
        heads = np.arange(self.num_repeated) * self.num_stored // self.num_repeated
        return (heads[:, None] * head_size + np.arange(head_size)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class LoadTarget:
    """A parameter as it is laid out on the devices.

    `spec` describes the global array. `sources` are the single-device model's parameters that it is
    made of: one, or, if it `is_stacked`, one for each pipeline stage along its first axis. Without
    a `sharding` it is placed on the default device.
    """

    spec: ParameterSpec
    sources: tuple[ParameterSpec, ...]
    is_stacked: bool = False
    repeats: HeadRepeats | None = None
    sharding: NamedSharding | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes of its sources, in the model's type."""
        return sum(source.nbytes for source in self.sources)

    def repeats_of(self, array: Any) -> HeadRepeats | None:
        """Return the repetition that applies to one of its arrays, or None.

        A quantized parameter's matrices have the columns of all heads; the order of its inputs and
        the scale of x have no head axis.
        """
        return self.repeats if array.ndim == len(self.sources[0].shape) else None

    @property
    def row_parts(self) -> int:
        """The number of parts into which the mesh splits the inputs of its matmul."""
        if self.sharding is None or self.spec.packs is None:
            return 1
        names = product_axes(self.spec, self.sharding.spec)[-2]
        return math.prod(self.sharding.mesh.shape[name] for name in names)


def full_axes(split: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """List the mesh axes that split each of an array's `ndim` axes.

    Axes beyond the length of `split` are not split.
    """
    named = (*split, *[None] * (ndim - len(split)))
    return [(names,) if isinstance(names, str) else tuple(names or ()) for names in named]


def product_axes(spec: ParameterSpec, split: PartitionSpec) -> list[tuple[str, ...]]:
    """Return `full_axes` of the parameter in its matmul's layout, [..., inputs, outputs].

    A table is stored as [outputs, inputs], so its last two axes are swapped.
    """
    axes = full_axes(split, len(spec.shape))
    return [*axes[:-2], axes[-1], axes[-2]] if spec.packs == "table" else axes


def load_targets(model: FunctionalModel | ShardedModel) -> tuple[LoadTarget, ...]:
    """Return the load targets of a model, in the order of its parameters."""
    if isinstance(model, FunctionalModel):
        return tuple(LoadTarget(spec, (spec,)) for spec in model.parameters)
    if model.mesh is None:
        return load_targets(model.model)
    given = {spec.path: spec for spec in model.model.parameters}
    shardings, found = model.shardings, []
    for spec, source in zip(model.parameters, model.sources, strict=True):
        repeats = None
        if source.num_kv_heads is not None:
            axis = spec.array_axes.index("kv_heads") - len(spec.shape)
            repeats = HeadRepeats(axis, model.model.config.num_kv_heads, source.num_kv_heads)
        specs = tuple(given[path] for path in source.paths)
        found.append(LoadTarget(spec, specs, source.is_stacked, repeats, shardings[spec.path]))
    return tuple(found)


def single_device_model(model: FunctionalModel | ShardedModel) -> FunctionalModel:
    """Return the single-device model, whose parameters have a checkpoint's names and shapes."""
    return model if isinstance(model, FunctionalModel) else model.model
