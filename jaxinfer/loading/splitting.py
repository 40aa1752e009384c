"""Quantized parameters in parts: what has to change so that each part is one by itself, and placing
them, each device with its own.

A product whose inputs are split multiplies a part of a weight's rows on each device. So groups of
rows that share a scale end where a part does, and so do the runs in which 4 bits are packed. Where
they do not, groups are cut into smaller ones with the same scale, and bytes are packed anew: the
numbers are the same. The scales of x, where it is quantized token by token, are of all its inputs,
on whichever device (`nn/quantized.py`).
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
    cut,
    empty_part,
    is_within,
    owned_bounds,
    tree_shardings,
)
from jaxinfer.loading.targets import Target
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight

MIN_GROUP = 16  # rows; with fewer, scales and zeros take as much as the values


class Unpackable(Exception):
    """Why a parameter cannot stay quantized, or be so."""


def divided(weight: Any, parts: int) -> Any:
    """The same weight with rows that can be cut into `parts`. Raises `Unpackable`."""
    if parts == 1 or not isinstance(weight, Quantized):
        return weight
    if isinstance(weight, QuantPair):
        return QuantPair(_of_weight(weight.gate, parts), _of_weight(weight.up, parts))
    return _of_weight(weight, parts) if isinstance(weight, QuantWeight) else _rows(weight, parts)


def is_divided(weight: Quantized, parts: int) -> bool:
    """Whether it is so already."""
    if parts == 1 or isinstance(weight, QuantPair):
        return parts == 1
    if isinstance(weight, QuantWeight):
        return weight.order is None and is_divided(weight.weight, parts)
    rows = weight.num_rows // parts
    return rows % weight.group_size == 0 and rows % (weight.pack_rows or 1) == 0


def _of_weight(weight: QuantWeight, parts: int) -> QuantWeight:
    if weight.order is not None:
        raise Unpackable(
            f"its {weight.weight.num_rows} inputs stand in an order of their own (act-order), and "
            f"the mesh splits them into {parts} parts"
        )
    return dataclasses.replace(weight, weight=_rows(weight.weight, parts))


def _rows(weight: QuantArray, parts: int) -> QuantArray:
    rows = weight.num_rows // parts
    group = math.gcd(weight.group_size, rows)
    if not _can_be_part(weight, rows):
        fitting = [n for n in range(1, 1025) if _can_be_part(weight, weight.num_rows / n)]
        raise Unpackable(
            f"the mesh splits its {weight.num_rows} inputs into {parts} parts, of {rows}, and its "
            f"groups, of {weight.group_size}, to {group} (at least {MIN_GROUP}, and pairs of 4 "
            f"bits); {', '.join(map(str, fitting))} parts would do"
        )
    times = weight.group_size // group
    again = lambda a: None if a is None else np.repeat(np.asarray(a), times, axis=-2)
    changed = dataclasses.replace(
        weight, scales=again(weight.scales), zeros=again(weight.zeros), group_size=group
    )
    if weight.bits == 8 or rows % weight.pack_rows == 0:
        return changed
    pack_rows = pack_rows_for(rows)
    values = pack(unpack(np.asarray(weight.values), weight.pack_rows), pack_rows)
    return dataclasses.replace(changed, values=values, pack_rows=pack_rows)


def _can_be_part(weight: QuantArray, rows: float) -> bool:
    """Whether so many rows hold pairs of 4 bits, and groups that are worth their scales."""
    if rows % (2 if weight.bits == 4 else 1):
        return False
    group = math.gcd(weight.group_size, int(rows))
    return group >= MIN_GROUP or group in (weight.group_size, rows)


def place_whole(target: Target, read: Callable[[int], Any]) -> Any:
    """A parameter, quantized or not, on the target's devices: `read(i)` is its i-th source.

    A source is whole in the memory of every process, one at a time, however few of its slices that
    holds: where values are packed, and inputs sorted, is not known of slices of a file. Raises
    `Unpackable` where its parts would be none by themselves, or stages would be unlike.
    """
    if target.sharding is None:
        return jax.device_put(_held(read(0)))
    structure: Any = None
    arrays: list[_Parts] = []
    # Those of other processes' stages are read too: all must come to the same end.
    for stage in range(len(target.sources)):
        tree = _held(divided(read(stage), target.row_parts))
        leaves = jax.tree.leaves(tree)
        found = jax.tree.structure(tree), [(a.shape, a.dtype) for a in leaves]
        if structure is None:
            structure = found
            where = jax.tree.leaves(tree_shardings(tree, target.spec, target.sharding))
            arrays = [_Parts(a, s, target) for a, s in zip(leaves, where, strict=True)]
        elif found != structure:
            raise Unpackable("its stages are quantized in different ways")
        index = (stage,) if target.is_stacked else ()
        for array, leaf in zip(arrays, leaves, strict=True):
            array.put(index, leaf)
    return jax.tree.unflatten(structure[0], [array.joined() for array in arrays])


class _Parts:
    """One array of a quantized parameter, as it comes to its devices stage by stage."""

    def __init__(self, like: np.ndarray, sharding: Any, target: Target):
        self.sharding = sharding
        self.repeats = target.repeats_of(like)
        shape = like.shape if self.repeats is None else self.repeats.held_shape(like.shape)
        self.shape = (len(target.sources), *shape) if target.is_stacked else shape
        self.owners = owned_bounds(sharding, self.shape)
        self.dtype = like.dtype
        self.placed: dict[Any, jax.Array] = {}

    def put(self, index: tuple[int, ...], values: np.ndarray) -> None:
        """`values` are what stands at `index` of the first axes."""
        slices = {b: None for b in self.owners.values() if is_within(index, b)}
        for bounds in slices:
            part = empty_part(bounds, self.dtype)
            part[...] = cut(values, bounds[len(index) :], self.repeats)
            for device, held in self.owners.items():
                if held == bounds:
                    self.placed[device] = jax.device_put(part, device)

    def joined(self) -> jax.Array:
        parts = [self.placed[device] for device in self.owners]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def _held(weight: Any) -> Any:
    """In NumPy arrays, of the types that they have on the devices."""
    weight = jax.tree.map(np.asarray, weight)
    if not isinstance(weight, Quantized):
        return weight
    return jax.tree.map(lambda a: a.astype(held_dtype(a.dtype), copy=False), weight)


def held_dtype(dtype: Any) -> Any:
    """The type of a stored quantized parameter's array on the devices: on a TPU no float16, which
    Mosaic does not load."""
    return np.dtype(np.float32) if dtype == np.float16 and platform() == "tpu" else dtype
