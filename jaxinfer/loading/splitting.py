"""Split quantized parameters over a mesh, and place the parts on their devices.

If a matmul's inputs are split, each device multiplies a part of the weight's rows. Groups of rows
that share a scale must then end where a part ends, and so must the runs of rows in which 4-bit
values are packed. Where they do not, the groups are divided into smaller ones with the same scale,
and the values are repacked: the numbers stay the same. The scales of x, if it is quantized token by
token, always cover all of its inputs (`nn/quantized.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, pack, pack_rows_for, unpack
from jaxinfer.loading.placement import (
    device_bounds,
    empty_slice,
    is_within,
    slice_values,
    tree_shardings,
)
from jaxinfer.loading.targets import LoadTarget, load_targets
from jaxinfer.models.functional import Weights
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight
from jaxinfer.options import ConfigError
from jaxinfer.parallel.sharded_model import ShardedModel

MIN_GROUP = 16  # rows; with fewer, scales and zeros take as much as the values


class UnpackableError(Exception):
    """Raised with the reason why a parameter cannot stay quantized or be quantized."""


def split_groups(weight: Any, parts: int) -> Any:
    """Regroup a weight so that its rows can be split into `parts`. Raises `UnpackableError`."""
    if parts == 1 or not isinstance(weight, Quantized):
        return weight
    if isinstance(weight, QuantPair):
        return QuantPair(_split_weight(weight.gate, parts), _split_weight(weight.up, parts))
    if isinstance(weight, QuantWeight):
        return _split_weight(weight, parts)
    return _split_array(weight, parts)


def can_split_rows(weight: Quantized, parts: int) -> bool:
    """Whether the rows can be split into `parts` without regrouping."""
    if parts == 1 or isinstance(weight, QuantPair):
        return parts == 1
    if isinstance(weight, QuantWeight):
        return weight.order is None and can_split_rows(weight.weight, parts)
    rows = weight.num_rows // parts
    return rows % weight.group_size == 0 and rows % (weight.pack_rows or 1) == 0


def _split_weight(weight: QuantWeight, parts: int) -> QuantWeight:
    if weight.order is not None:
        raise UnpackableError(
            f"its {weight.weight.num_rows} inputs are reordered (act-order), and the mesh splits "
            f"them into {parts} parts"
        )
    return dataclasses.replace(weight, weight=_split_array(weight.weight, parts))


def _split_array(weight: QuantArray, parts: int) -> QuantArray:
    rows = weight.num_rows // parts
    group = math.gcd(weight.group_size, rows)
    if not _can_be_part(weight, rows):
        possible = [n for n in range(1, 1025) if _can_be_part(weight, weight.num_rows / n)]
        raise UnpackableError(
            f"the mesh splits its {weight.num_rows} inputs into {parts} parts of {rows}, and its "
            f"groups of {weight.group_size} into groups of {group} (the minimum is {MIN_GROUP}, "
            "and 4-bit values are packed in pairs); possible numbers of parts are "
            f"{', '.join(map(str, possible))}"
        )
    times = weight.group_size // group
    repeat = lambda a: None if a is None else np.repeat(np.asarray(a), times, axis=-2)
    changed = dataclasses.replace(
        weight, scales=repeat(weight.scales), zeros=repeat(weight.zeros), group_size=group
    )
    if weight.bits == 8 or rows % weight.pack_rows == 0:
        return changed
    pack_rows = pack_rows_for(rows)
    values = pack(unpack(np.asarray(weight.values), weight.pack_rows), pack_rows)
    return dataclasses.replace(changed, values=values, pack_rows=pack_rows)


def _can_be_part(weight: QuantArray, rows: float) -> bool:
    """Whether a part may have this many rows: whole 4-bit pairs, and groups that are not too
    small for their scales."""
    if rows % (2 if weight.bits == 4 else 1):
        return False
    group = math.gcd(weight.group_size, int(rows))
    return group >= MIN_GROUP or group in (weight.group_size, rows)


def place_whole(target: LoadTarget, read: Callable[[int], Any]) -> Any:
    """Place a parameter, quantized or not, on the target's devices; `read(i)` gives source i.

    Every process reads the sources whole, one at a time, even if it holds few of their slices:
    values are packed and inputs are sorted over a whole source. Raises `UnpackableError` if it
    cannot be split into complete quantized weights, or if its stages are quantized differently.
    """
    if target.sharding is None:
        return jax.device_put(_to_device_dtypes(read(0)))
    structure: Any = None
    arrays: list[_DeviceSlices] = []
    # Sources of other processes' stages are read too, so that all processes reach the same result.
    for stage in range(len(target.sources)):
        tree = _to_device_dtypes(split_groups(read(stage), target.row_parts))
        leaves = jax.tree.leaves(tree)
        found = jax.tree.structure(tree), [(a.shape, a.dtype) for a in leaves]
        if structure is None:
            structure = found
            where = jax.tree.leaves(tree_shardings(tree, target.spec, target.sharding))
            arrays = [_DeviceSlices(a, s, target) for a, s in zip(leaves, where, strict=True)]
        elif found != structure:
            raise UnpackableError("its stages are quantized in different ways")
        index = (stage,) if target.is_stacked else ()
        for array, leaf in zip(arrays, leaves, strict=True):
            array.put(index, leaf)
    return jax.tree.unflatten(structure[0], [array.joined() for array in arrays])


def place_weights(model: ShardedModel, weights: Weights) -> Weights:
    """Place the weights of `model.model`, whole in this process, on the model's mesh.

    Raises `ConfigError` for a quantized parameter that the mesh cannot split.
    """
    if model.mesh is None:
        return weights
    by_path = {s.path: w for s, w in zip(model.model.parameters, weights, strict=True)}
    placed = []
    for target in load_targets(model):
        read = lambda i, target=target: by_path[target.sources[i].path]
        try:
            placed.append(place_whole(target, read))
        except UnpackableError as why:
            raise ConfigError(
                f"{target.spec.path} is quantized, and cannot be split over this mesh: {why}; load "
                "the checkpoint for this mesh (load_weights of the ShardedModel dequantizes where "
                "it has to)"
            ) from why
    return tuple(placed)


class _DeviceSlices:
    """The slices of one array of a quantized parameter, placed on their devices stage by stage."""

    def __init__(self, like: np.ndarray, sharding: Any, target: LoadTarget):
        self.sharding = sharding
        self.repeats = target.repeats_of(like)
        shape = like.shape if self.repeats is None else self.repeats.repeated_shape(like.shape)
        self.shape = (len(target.sources), *shape) if target.is_stacked else shape
        self.owners = device_bounds(sharding, self.shape)
        self.dtype = like.dtype
        self.placed: dict[Any, jax.Array] = {}

    def put(self, index: tuple[int, ...], values: np.ndarray) -> None:
        """Place the slices of `values`, the elements at `index` of the first axes."""
        slices = {b: None for b in self.owners.values() if is_within(index, b)}
        for bounds in slices:
            part = empty_slice(bounds, self.dtype)
            part[...] = slice_values(values, bounds[len(index) :], self.repeats)
            for device, owned in self.owners.items():
                if owned == bounds:
                    self.placed[device] = jax.device_put(part, device)

    def joined(self) -> jax.Array:
        parts = [self.placed[device] for device in self.owners]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def _to_device_dtypes(weight: Any) -> Any:
    """Convert to NumPy arrays of the types that they have on the devices."""
    weight = jax.tree.map(np.asarray, weight)
    if not isinstance(weight, Quantized):
        return weight
    return jax.tree.map(lambda a: a.astype(device_dtype(a.dtype), copy=False), weight)


def device_dtype(dtype: Any) -> Any:
    """Return the type on the devices of a stored quantized parameter's array.

    On a TPU float16 becomes float32, since Mosaic cannot load float16.
    """
    return np.dtype(np.float32) if dtype == np.float16 and platform() == "tpu" else dtype
