"""From the file to the devices: a parameter's array, each device holding its own slice.

What is read is a view of the mapped file wherever the layout allows, so a slice touches its own
pages only: rows of a stored [out, in] tensor, or parts of its rows. A tensor that has to be made
first (dequantized, permuted) is made once for all devices of this process. Host memory holds, for
each parameter in flight, the slices of this process's devices and one such tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxinfer.loading.checkpoint import CheckpointError, aligned_empty, is_aligned
from jaxinfer.models.functional import ParameterSpec

Bounds = tuple[tuple[int, int], ...]  # of each axis: first number, and one past the last
# Rows of the stored tensor copied at once. A transposed weight [4096, 7168] goes at 1.5 GB/s so,
# at 0.4 as a whole (bfloat16, one core of an AMD EPYC, November 2026): its lines stay in the cache.
STRIP_ROWS = 64


class Piece(NamedTuple):
    """A stored tensor as a parameter, or as the `item`-th of the parameter's first axis.

    `read` gives it in the parameter's dimensions, in whatever number type it has: a view of the
    file, or a new array, which may then be kept.
    """

    name: str
    item: int | None
    read: Callable[[], np.ndarray]


def place(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    pieces: Sequence[Piece],
    sharding: Sharding | None = None,
) -> jax.Array:
    """The array of `shape` that the pieces make, on the devices of `sharding`, or on the default.

    `CheckpointError` for numbers that are NaN or infinite as `dtype`.
    """
    if sharding is None:
        return jax.device_put(whole(shape, dtype, pieces))
    owners = {
        device: tuple(part.indices(n)[:2] for part, n in zip(index or (), shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    slices = read_slices(shape, dtype, pieces, owners.values())
    arrays = [jax.device_put(slices[bounds], device) for device, bounds in owners.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def read_slices(
    shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[Piece], wanted: Iterable[Bounds]
) -> dict[Bounds, np.ndarray]:
    """The parts of the parameter within `wanted`, each once; nothing else of a file is touched,
    where a piece is a view of it."""
    slices = {
        bounds: aligned_empty(tuple(stop - start for start, stop in bounds), dtype)
        for bounds in set(wanted)  # replicas have the same
    }
    for piece in pieces:  # the outer loop, so that each is read once
        values = _in_shape(piece, shape)
        for bounds, buffer in slices.items():
            cut = tuple(slice(start, stop) for start, stop in bounds)
            if piece.item is None:
                copy_finite(buffer, values[cut], piece.name)
            elif cut[0].start <= piece.item < cut[0].stop:
                copy_finite(buffer[piece.item - cut[0].start], values[cut[1:]], piece.name)
    return slices


def whole(shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[Piece]) -> np.ndarray:
    """The array of `shape` that the pieces make, on the host. Errors as `place`."""
    buffer: np.ndarray | None = None
    for piece in pieces:
        values = _in_shape(piece, shape)
        if piece.item is None and _can_be_kept(values, dtype):
            check_finite(values, piece.name)
            return values
        if buffer is None:
            buffer = aligned_empty(shape, dtype)
        copy_finite(buffer if piece.item is None else buffer[piece.item], values, piece.name)
    assert buffer is not None
    return buffer


def _in_shape(piece: Piece, shape: tuple[int, ...]) -> np.ndarray:
    """The piece in the array's own dimensions, where several of a parameter's may be one."""
    return np.asarray(piece.read()).reshape(shape if piece.item is None else shape[1:])


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


def tree_shardings(tree: Any, spec: ParameterSpec, sharding: Sharding) -> Any:
    """For each array of a quantized parameter (an array alone is one), where it lies.

    Matrices lie as the parameter would, along axes that are long enough to be cut so (the groups of
    scales often are not); other arrays lie on every device.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda leaf: sharding, tree)
    axes = (*sharding.spec, *[None] * (len(spec.shape) - len(sharding.spec)))
    is_plain = len(jax.tree.leaves(tree)) == 1 and jax.tree.leaves(tree)[0].shape == spec.shape
    if spec.packs == "table" and not is_plain:
        axes = axes[::-1]

    def of_leaf(leaf: Any) -> NamedSharding:
        own = axes
        if leaf.ndim == len(axes) - 1 >= 2:  # gate or up, a matrix of its own
            own = axes[1:]
        if leaf.ndim != len(own):
            return NamedSharding(sharding.mesh, PartitionSpec())
        cut = [
            axis if _can_cut(sharding, axis, n) else None
            for axis, n in zip(own, leaf.shape, strict=True)
        ]
        return NamedSharding(sharding.mesh, PartitionSpec(*cut))

    return jax.tree.map(of_leaf, tree)


def _can_cut(sharding: NamedSharding, axis: Any, size: int) -> bool:
    names = (axis,) if isinstance(axis, str) else axis or ()
    return size % math.prod(sharding.mesh.shape[name] for name in names) == 0
