"""From the file to the devices: a parameter's array, each device holding its own slice.

What is read is a view of the mapped file wherever the layout allows, so a slice touches its own
pages only: rows of a stored [out, in] tensor, or parts of its rows. A tensor that has to be made
first (dequantized, permuted) is made once for all devices of this process. Host memory holds, for
each parameter in flight, the slices of this process's devices and one such tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxinfer.kernels.quantized_matmul import QuantArray
from jaxinfer.loading.checkpoint import CheckpointError, aligned_empty, is_aligned
from jaxinfer.loading.targets import Repeats, Target, product_axes
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight

Bounds = tuple[tuple[int, int], ...]  # of each axis: first number, and one past the last
# Rows of the stored tensor copied at once. A transposed weight [4096, 7168] goes at 1.5 GB/s so,
# at 0.4 as a whole (bfloat16, one core of an AMD EPYC, November 2026): its lines stay in the cache.
STRIP_ROWS = 64


class Piece(NamedTuple):
    """A stored tensor as a parameter, or as the part of it at `index` of its first axes.

    `read` gives it in the parameter's dimensions, in whatever number type it has: a view of the
    file, or a new array, which may then be kept.
    """

    name: str
    index: tuple[int, ...]
    read: Callable[[], np.ndarray]


def place(target: Target, pieces: Sequence[Piece]) -> jax.Array:
    """The array that the pieces make, on the target's devices.

    `CheckpointError` for numbers that are NaN or infinite in its type.
    """
    spec, sharding = target.spec, target.sharding
    if sharding is None:
        return jax.device_put(whole(spec.shape, spec.dtype, pieces))
    owners = owned_bounds(sharding, spec.shape)
    slices = read_slices(spec.shape, spec.dtype, pieces, owners.values(), target.repeats)
    arrays = [jax.device_put(slices[bounds], device) for device, bounds in owners.items()]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)


def owned_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Bounds]:
    """What each device of this process holds of an array."""
    return {
        device: tuple(part.indices(n)[:2] for part, n in zip(index or (), shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }


def read_slices(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    pieces: Sequence[Piece],
    wanted: Iterable[Bounds],
    repeats: Repeats | None = None,
) -> dict[Bounds, np.ndarray]:
    """The parts of the parameter within `wanted`, each once; nothing else of a file is touched,
    where a piece is a view of it, and a piece that no part has is not read at all.

    `shape` and `wanted` are of the parameter as it is held, its KV heads repeated.
    """
    slices = {bounds: empty_part(bounds, dtype) for bounds in set(wanted)}  # replicas have the same
    own = shape if repeats is None else repeats.own_shape(shape)
    for piece in pieces:  # the outer loop, so that each is read once
        holders = [bounds for bounds in slices if is_within(piece.index, bounds)]
        if not holders:
            continue
        values = _in_shape(piece, own)
        for bounds in holders:
            starts = (start for start, _ in bounds)
            at = tuple(i - start for i, start in zip(piece.index, starts, strict=False))
            rest = bounds[len(piece.index) :]
            copy_finite(slices[bounds][(*at, ...)], cut(values, rest, repeats), piece.name)
    return slices


def empty_part(bounds: Bounds, dtype: np.dtype[Any]) -> np.ndarray:
    return aligned_empty(tuple(stop - start for start, stop in bounds), dtype)


def is_within(index: tuple[int, ...], bounds: Bounds) -> bool:
    """Whether the part within `bounds` holds what stands at `index` of the first axes."""
    return all(start <= i < stop for i, (start, stop) in zip(index, bounds, strict=False))


def cut(values: np.ndarray, bounds: Bounds, repeats: Repeats | None) -> np.ndarray:
    """The part within `bounds`, which are those of the values with their KV heads repeated: a view
    wherever it can be one."""
    of_axis: list[Any] = [slice(start, stop) for start, stop in bounds]
    if repeats is not None:
        size = repeats.held_shape(values.shape)[repeats.axis]
        index = repeats.index(size)[of_axis[repeats.axis]]
        is_run = (np.diff(index) == 1).all()
        of_axis[repeats.axis] = slice(int(index[0]), int(index[-1]) + 1) if is_run else index
    return values[tuple(of_axis)]


def whole(shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[Piece]) -> np.ndarray:
    """The array of `shape` that the pieces make, on the host. Errors as `place`."""
    buffer: np.ndarray | None = None
    for piece in pieces:
        values = _in_shape(piece, shape)
        if not piece.index and _can_be_kept(values, dtype):
            check_finite(values, piece.name)
            return values
        if buffer is None:
            buffer = aligned_empty(shape, dtype)
        copy_finite(buffer[(*piece.index, ...)], values, piece.name)
    assert buffer is not None
    return buffer


def _in_shape(piece: Piece, shape: tuple[int, ...]) -> np.ndarray:
    """The piece in the array's own dimensions, where several of a parameter's may be one."""
    return np.asarray(piece.read()).reshape(shape[len(piece.index) :])


def _can_be_kept(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """A new array that is as it has to be, and no view of a file that may change."""
    flags = values.flags
    return values.dtype == dtype and flags.c_contiguous and flags.writeable and is_aligned(values)


def copy_finite(buffer: np.ndarray, values: np.ndarray, name: str) -> None:
    """Copy values in the buffer's type; `CheckpointError` for those that are not finite in it."""
    with np.errstate(over="ignore", invalid="ignore"):
        if values.ndim < 2 or values.flags.c_contiguous:
            np.copyto(buffer, values, casting="unsafe")
        else:
            axis = int(np.argmax(np.abs(values.strides)))
            for start in range(0, values.shape[axis], STRIP_ROWS):
                strip = (*[slice(None)] * axis, slice(start, start + STRIP_ROWS))
                np.copyto(buffer[strip], values[strip], casting="unsafe")
    check_finite(buffer, name)


def check_finite(values: np.ndarray, name: str) -> None:
    """Refuse NaN and infinity; integers have none."""
    # Summing finds them without a temporary of the tensor's size.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):
            return
        bad = np.count_nonzero(~np.isfinite(values.astype(np.float32)))
    raise CheckpointError(
        f"{name} holds {bad} values that are NaN or infinite as {values.dtype}: the file is "
        "damaged or was converted wrongly (fetch or convert it again), or the type is too narrow "
        "(try --set dtype=bfloat16)"
    )


def specs_of(weight: Any, spec: ParameterSpec, split: PartitionSpec) -> Any:
    """For each array of a parameter (which may be an array itself), how it is split, where the
    parameter's array would be split by `split`: values, scales and zeros by the same parts, so that
    every part is a quantized weight by itself (`splitting.divided` makes it so).
    """
    if not isinstance(weight, Quantized):
        return split
    axes = product_axes(spec, split)
    if isinstance(weight, QuantPair):
        half = spec.axes.index("half")
        axes = axes[:half] + axes[half + 1 :]
        return QuantPair(_of_weight(weight.gate, axes), _of_weight(weight.up, axes))
    return _of_weight(weight, axes)


def _of_weight(weight: QuantArray | QuantWeight, axes: list[tuple[str, ...]]) -> Any:
    if isinstance(weight, QuantArray):
        return jax.tree.map(lambda array: PartitionSpec(*axes), weight)
    stage = axes[:-2]
    return dataclasses.replace(
        weight,
        weight=_of_weight(weight.weight, axes),
        order=None if weight.order is None else PartitionSpec(*stage, None),
        x_scale=None if weight.x_scale is None else PartitionSpec(*stage),
    )


def tree_shardings(tree: Any, spec: ParameterSpec, sharding: Sharding) -> Any:
    """`specs_of` on the sharding's mesh."""
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda leaf: sharding, tree)
    on_mesh = lambda split: NamedSharding(sharding.mesh, split)
    return jax.tree.map(on_mesh, specs_of(tree, spec, sharding.spec))
