"""Place a parameter's array on the devices, from its file: each device gets its own slice.

Wherever the layout allows, a read gives a view of the mapped file, so a slice touches only its own
pages: rows of a stored [out, in] tensor, or parts of its rows. A tensor that has to be computed
first (dequantized, permuted) is computed once for all devices of this process. Host memory holds,
for each parameter in flight, the slices of this process's devices and one such tensor.
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
from jaxinfer.loading.targets import HeadRepeats, LoadTarget, product_axes
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each axis
# Rows of the stored tensor copied at once, so that their cache lines stay in the cache: a
# transposed weight [4096, 7168] is copied at 1.5 GB/s this way, and at 0.4 GB/s in one copy
# (bfloat16, one core of an AMD EPYC, November 2026).
STRIP_ROWS = 64


class Piece(NamedTuple):
    """A stored tensor that makes up a parameter, or the part at `index` of its first axes.

    `read` returns its values in the parameter's dimensions and in the stored number type, as a view
    of the file or as a new array, which the caller may keep.
    """

    name: str
    index: tuple[int, ...]
    read: Callable[[], np.ndarray]


def place(target: LoadTarget, pieces: Sequence[Piece]) -> jax.Array:
    """Assemble a parameter from its pieces, on the target's devices.

    Raises `CheckpointError` for numbers that are NaN or infinite in the target's type.
    """
    spec, sharding = target.spec, target.sharding
    if sharding is None:
        return jax.device_put(assemble(spec.shape, spec.dtype, pieces))
    owners = device_bounds(sharding, spec.shape)
    slices = read_slices(spec.shape, spec.dtype, pieces, owners.values(), target.repeats)
    arrays = [jax.device_put(slices[bounds], device) for device, bounds in owners.items()]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)


def device_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Bounds]:
    """Return the bounds of the slice that each device of this process holds of an array."""
    return {
        device: tuple(part.indices(n)[:2] for part, n in zip(index or (), shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }


def read_slices(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    pieces: Sequence[Piece],
    wanted: Iterable[Bounds],
    repeats: HeadRepeats | None = None,
) -> dict[Bounds, np.ndarray]:
    """Read the slices of the parameter within each of the `wanted` bounds, each slice once.

    Where a piece is a view of its file, only the pages of these slices are touched; a piece that
    overlaps none of them is not read. `shape` and `wanted` count repeated KV heads.
    """
    # A set, because replicas want the same slices.
    slices = {bounds: empty_slice(bounds, dtype) for bounds in set(wanted)}
    stored_shape = shape if repeats is None else repeats.stored_shape(shape)
    for piece in pieces:  # the outer loop, so that each is read once
        holders = [bounds for bounds in slices if is_within(piece.index, bounds)]
        if not holders:
            continue
        values = _read_piece(piece, stored_shape)
        for bounds in holders:
            starts = (start for start, _ in bounds)
            at = tuple(i - start for i, start in zip(piece.index, starts, strict=False))
            rest = bounds[len(piece.index) :]
            part = slice_values(values, rest, repeats)
            copy_checked(slices[bounds][(*at, ...)], part, piece.name)
    return slices


def empty_slice(bounds: Bounds, dtype: np.dtype[Any]) -> np.ndarray:
    """Allocate an uninitialized array of the size of `bounds`."""
    return aligned_empty(tuple(stop - start for start, stop in bounds), dtype)


def is_within(index: tuple[int, ...], bounds: Bounds) -> bool:
    """Whether `bounds` contain the element at `index` of the first axes."""
    return all(start <= i < stop for i, (start, stop) in zip(index, bounds, strict=False))


def slice_values(values: np.ndarray, bounds: Bounds, repeats: HeadRepeats | None) -> np.ndarray:
    """Return the part of `values` within `bounds`, as a view where possible.

    The bounds count repeated KV heads; the values have each head once.
    """
    slices: list[Any] = [slice(start, stop) for start, stop in bounds]
    if repeats is not None:
        size = repeats.repeated_shape(values.shape)[repeats.axis]
        index = repeats.stored_indices(size)[slices[repeats.axis]]
        is_contiguous = (np.diff(index) == 1).all()
        slices[repeats.axis] = slice(int(index[0]), int(index[-1]) + 1) if is_contiguous else index
    return values[tuple(slices)]


def assemble(shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[Piece]) -> np.ndarray:
    """Assemble the array of `shape` from the pieces, on the host. Raises the errors of `place`."""
    buffer: np.ndarray | None = None
    for piece in pieces:
        values = _read_piece(piece, shape)
        if not piece.index and _can_be_kept(values, dtype):
            check_finite(values, piece.name)
            return values
        if buffer is None:
            buffer = aligned_empty(shape, dtype)
        copy_checked(buffer[(*piece.index, ...)], values, piece.name)
    assert buffer is not None
    return buffer


def _read_piece(piece: Piece, shape: tuple[int, ...]) -> np.ndarray:
    """Read a piece and reshape it to the array's axes, which may merge several dimensions."""
    return np.asarray(piece.read()).reshape(shape[len(piece.index) :])


def _can_be_kept(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Whether an array can be used without a copy: it has the right type, layout and alignment,
    and is not a view of a file, which may change."""
    flags = values.flags
    return values.dtype == dtype and flags.c_contiguous and flags.writeable and is_aligned(values)


def copy_checked(buffer: np.ndarray, values: np.ndarray, name: str) -> None:
    """Copy values into the buffer, converting to its type.

    Raises `CheckpointError` for values that are not finite in that type.
    """
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
    """Raise `CheckpointError` for NaN and infinity."""
    # A sum detects them without a temporary of the tensor's size.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):
            return
        bad = np.count_nonzero(~np.isfinite(values.astype(np.float32)))
    raise CheckpointError(
        f"{name} holds {bad} values that are NaN or infinite as {values.dtype}: the file is "
        "damaged or was converted wrongly (fetch or convert it again), or the type is too narrow "
        "(try --set dtype=bfloat16)"
    )


def partition_specs(weight: Any, spec: ParameterSpec, split: PartitionSpec) -> Any:
    """Return the `PartitionSpec` of each array of a parameter, whose own spec is `split`.

    A quantized parameter's values, scales and zeros are split into the same parts, so that every
    part is a complete quantized weight (`splitting.split_groups` makes that possible).
    """
    if not isinstance(weight, Quantized):
        return split
    axes = product_axes(spec, split)
    if isinstance(weight, QuantPair):
        half = spec.axes.index("half")
        axes = axes[:half] + axes[half + 1 :]
        return QuantPair(_weight_specs(weight.gate, axes), _weight_specs(weight.up, axes))
    return _weight_specs(weight, axes)


def _weight_specs(weight: QuantArray | QuantWeight, axes: list[tuple[str, ...]]) -> Any:
    if isinstance(weight, QuantArray):
        return jax.tree.map(lambda array: PartitionSpec(*axes), weight)
    stage = axes[:-2]
    return dataclasses.replace(
        weight,
        weight=_weight_specs(weight.weight, axes),
        order=None if weight.order is None else PartitionSpec(*stage, None),
        x_scale=None if weight.x_scale is None else PartitionSpec(*stage),
    )


def tree_shardings(tree: Any, spec: ParameterSpec, sharding: Sharding) -> Any:
    """Return `partition_specs` as shardings over the sharding's mesh."""
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda leaf: sharding, tree)
    on_mesh = lambda split: NamedSharding(sharding.mesh, split)
    return jax.tree.map(on_mesh, partition_specs(tree, spec, sharding.spec))
