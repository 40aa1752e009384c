"""Restore the parameters of a converted checkpoint (`orbax.py`), on one device or on a mesh.

Each array is stored as the single-device model has it. On a mesh, the devices of a pipeline stage
restore that stage's arrays, each device its own slice, and these become one array over all stages
without moving data. Two kinds of parameters are read whole by every process, a few at a time,
because a device's data is not a slice of the stored array: keys and values whose heads are
repeated, and quantized parameters whose groups or packed bytes the mesh splits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxinfer.kernels.quantized_matmul import dequantize
from jaxinfer.loading.checkpoint import ARRAYS_FOLDER, MANIFEST_FILE, CheckpointError
from jaxinfer.loading.load_report import LoadReport
from jaxinfer.loading.manifest import CONVERT_AGAIN, check_parameters
from jaxinfer.loading.placement import Piece, device_bounds, place, tree_shardings
from jaxinfer.loading.splitting import UnpackableError, can_split_rows, place_whole
from jaxinfer.loading.targets import LoadTarget, full_axes
from jaxinfer.models.functional import FunctionalModel, ParameterSpec, Weights
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight

# Parameters are read in groups of this size, each a step of the progress bar; host memory holds two
# or three times as much meanwhile.
GROUP_BYTES = 64 * 2**20
Entries = Mapping[str, Any]  # parameters by path, with a `ShapeDtypeStruct` for each array


def named_leaves(path: str, parameter: Any) -> Iterator[tuple[str, Any]]:
    """List the arrays of a parameter with the names under which they are stored."""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(parameter)[0]:
        yield path + "".join(f".{key.name}" for key in keys), leaf


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Return the Orbax handler that converted checkpoints are written and read with."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)


def restore(
    directory: Path,
    parameters: Mapping[str, Any],
    quantization: str | None,
    model: FunctionalModel,
    targets: Sequence[LoadTarget],
    *,
    keep_packed: bool,
    quantize: str | None,
    on_progress: Callable[[int], Any],
) -> Weights:
    """Load the weights of a converted checkpoint whose manifest lists these `parameters`.

    The contract is that of `jaxinfer.loading.assign.load_weights`.
    """
    if quantize not in (None, quantization):
        raise CheckpointError(
            f"{directory}: was converted with quantize={quantization}, not quantize={quantize}; "
            f"convert the original again with jaxinfer convert --quantize={quantize}"
        )
    found = check_parameters(directory / MANIFEST_FILE, parameters, model)
    entries = {spec.path: entry for spec, entry in found}
    keep_quantized = keep_packed or quantize is not None
    report = LoadReport()
    weights: list[Any] = []
    with ocp.Checkpointer(array_handler()) as checkpointer:
        for group in _groups(targets, entries):
            group_shardings = [
                _source_shardings(target, entries, keep_quantized) for target in group
            ]
            trees = {path: entries[path] for found in group_shardings for path in found}
            shardings = {path: s for found in group_shardings for path, s in found.items()}
            try:
                trees = _read(checkpointer, directory / ARRAYS_FOLDER, trees, shardings)
            # Orbax and TensorStore raise errors of many classes for missing or damaged files.
            except Exception as error:
                raise CheckpointError(
                    f"{directory / ARRAYS_FOLDER}: cannot be restored ({error}); {CONVERT_AGAIN}"
                ) from error
            for target in group:
                sources = {s.path: trees.pop(s.path) for s in target.sources if s.path in trees}
                weight = _place_sources(directory, target, sources, entries, keep_quantized, report)
                # The others were finite when they were converted.
                if _may_be_infinite(target, parameters):
                    _check_finite(directory, target.spec, weight)
                weights.append(weight)
                on_progress(target.nbytes)
    report.log(model, tuple(weights))
    return tuple(weights)


def _source_shardings(target: LoadTarget, entries: Entries, keep_quantized: bool) -> dict[str, Any]:
    """Return the sharding with which each array of the sources is read, by path.

    None reads an array to the host. Sources of which this process holds nothing are left out.
    """
    if target.sharding is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        [source] = target.sources
        return {source.path: tree_shardings(entries[source.path], source, here)}
    if not _is_sliced_as_stored(target, entries, keep_quantized):
        return {s.path: jax.tree.map(lambda leaf: None, entries[s.path]) for s in target.sources}
    shardings = {}
    for stage, source in enumerate(target.sources):
        sharding = _stage_sharding(target, stage)
        if sharding.addressable_devices:
            shardings[source.path] = tree_shardings(entries[source.path], source, sharding)
    return shardings


def _is_sliced_as_stored(target: LoadTarget, entries: Entries, keep_quantized: bool) -> bool:
    """Whether the devices' slices are slices of the stored arrays."""
    if target.repeats is not None:
        return False
    found = [entries[source.path] for source in target.sources]
    if not any(isinstance(entry, Quantized) for entry in found):
        return True
    structures = {(jax.tree.structure(e), str(jax.tree.leaves(e))) for e in found}
    return keep_quantized and len(structures) == 1 and can_split_rows(found[0], target.row_parts)


def _stage_sharding(target: LoadTarget, stage: int) -> NamedSharding:
    """Return the sharding of one source over the devices of its stage."""
    sharding = target.sharding
    assert sharding is not None
    mesh, axes = sharding.mesh, full_axes(sharding.spec, len(target.spec.shape))
    if target.is_stacked:
        [name] = axes[0]
        at = mesh.axis_names.index(name)
        of_stage = np.moveaxis(np.asarray(mesh.devices), at, 0)[[stage]]
        devices = np.moveaxis(of_stage, 0, at)
        mesh, axes = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), axes[1:]
    return NamedSharding(mesh, PartitionSpec(*axes))


def _place_sources(
    directory: Path,
    target: LoadTarget,
    sources: Mapping[str, Any],
    entries: Entries,
    keep_quantized: bool,
    report: LoadReport,
) -> Any:
    """Make the parameter from its sources that were read."""
    first = target.sources[0]
    if target.sharding is None:
        weight = sources[first.path]
        if isinstance(weight, Quantized) and not keep_quantized:
            return dequantize_parameter(weight, first)
        return weight
    if _is_sliced_as_stored(target, entries, keep_quantized):
        return _join_stages(target, sources, entries[first.path])
    if keep_quantized:
        try:
            return place_whole(target, lambda i: sources[target.sources[i].path])
        except UnpackableError as why:
            report.add("dequantized", target.spec.path, str(why))
    pieces = []
    for stage, source in enumerate(target.sources):
        read = lambda source=source: _dense_on_host(sources[source.path], source)
        index = (stage,) if target.is_stacked else ()
        pieces.append(Piece(f"{directory}: {source.path}", index, read))
    return place(target, pieces)


def _join_stages(target: LoadTarget, sources: Mapping[str, Any], entry: Any) -> Any:
    """Join the sources' arrays, each on the devices of its stage, into arrays over all stages."""
    assert target.sharding is not None
    found = [jax.tree.leaves(tree) for tree in sources.values()]
    leaves, structure = jax.tree.flatten(entry)
    shardings = jax.tree.leaves(tree_shardings(entry, target.spec, target.sharding))
    joined = []
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        arrays, shape = [leaves[i] for leaves in found], leaf.shape
        if target.is_stacked:
            arrays, shape = [jnp.expand_dims(a, 0) for a in arrays], (len(target.sources), *shape)
        shards = {s.device: s.data for array in arrays for s in array.addressable_shards}
        parts = [shards[device] for device in device_bounds(sharding, shape)]
        joined.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return jax.tree.unflatten(structure, joined)


def _dense_on_host(weight: Any, spec: ParameterSpec) -> np.ndarray:
    is_quantized = isinstance(weight, Quantized)
    return np.asarray(dequantize_parameter(weight, spec) if is_quantized else weight)


def _may_be_infinite(target: LoadTarget, parameters: Mapping[str, Any]) -> bool:
    """Whether a source is quantized, or its stored type has numbers too large for the model's."""
    limit = float(jnp.finfo(target.spec.dtype).max)
    found = [parameters[source.path].get("dtype") for source in target.sources]
    return any(d is None or float(jnp.finfo(jnp.dtype(d)).max) > limit for d in found)


def _check_finite(directory: Path, spec: ParameterSpec, weight: Any) -> None:
    """Raise `CheckpointError` for NaN and infinity; in a quantized parameter its scales count."""
    for leaf in jax.tree.leaves(weight):
        is_wide = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1
        if is_wide and not jnp.isfinite(leaf).all():
            raise CheckpointError(
                f"{directory}: {spec.path} holds values that are NaN or infinite as {leaf.dtype}: "
                "the type is too narrow (try --set dtype=bfloat16), or the files are damaged: "
                f"{CONVERT_AGAIN}"
            )


def dequantize_parameter(weight: Quantized, spec: ParameterSpec) -> jax.Array:
    """Return the array that a quantized parameter represents."""
    if isinstance(weight, QuantPair):
        return jnp.stack([dequantize_parameter(half, spec) for half in (weight.gate, weight.up)])
    order = None
    if isinstance(weight, QuantWeight):
        order, weight = weight.order, weight.weight
    matrix = dequantize(weight, spec.dtype)
    if order is not None:  # row d multiplies x[order[d]]
        matrix = jnp.take_along_axis(matrix, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    return matrix.T if spec.packs == "table" else matrix


def _read(
    checkpointer: ocp.Checkpointer,
    folder: Path,
    trees: Mapping[str, Any],
    shardings: Mapping[str, Any],
) -> dict[str, Any]:
    """Read the parameters of these paths, each array with its sharding."""
    leaves = dict(leaf for path, tree in trees.items() for leaf in named_leaves(path, tree))
    placed = dict(leaf for path, tree in shardings.items() for leaf in named_leaves(path, tree))
    restore_args = {name: _restore_args(leaf, placed.get(name)) for name, leaf in leaves.items()}
    # Partial, because the checkpoint has other arrays that are not read now.
    args = ocp.args.PyTreeRestore(item=leaves, restore_args=restore_args, partial_restore=True)
    arrays = checkpointer.restore(folder.absolute(), args=args)
    return {
        path: jax.tree.unflatten(
            jax.tree.structure(tree), [arrays[name] for name, _ in named_leaves(path, tree)]
        )
        for path, tree in trees.items()
    }


def _restore_args(leaf: Any, sharding: Sharding | None) -> ocp.RestoreArgs:
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _groups(targets: Sequence[LoadTarget], entries: Entries) -> Iterator[list[LoadTarget]]:
    """Split the targets, in order, into groups of at least `GROUP_BYTES` (the last may be less)."""
    group: list[LoadTarget] = []
    num_bytes = 0
    for target in targets:
        group.append(target)
        leaves = jax.tree.leaves([entries[source.path] for source in target.sources])
        num_bytes += sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        if num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group
