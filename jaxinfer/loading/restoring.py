"""Parameters out of a converted checkpoint (`orbax.py`), on one device or on a mesh.

Each array is stored as the model on one device has it. On a mesh the devices of a stage restore
that stage's, each its own slices, which are then joined to one array over all stages: none moves.
Some is read whole by every process, a few parameters at a time: what a device holds is no slice of
keys and values whose heads are repeated, and none of a quantized parameter where the mesh splits
groups or packed bytes.
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
from jaxinfer.loading.manifest import CONVERT_AGAIN, checked
from jaxinfer.loading.placement import Piece, owned_bounds, place, tree_shardings
from jaxinfer.loading.splitting import Unpackable, is_divided, place_whole
from jaxinfer.loading.targets import Target, full_axes
from jaxinfer.models.functional import FunctionalModel, ParameterSpec, Weights
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight

# Read at once, a step of the progress bar; the host holds two or three times that in the meantime.
GROUP_BYTES = 64 * 2**20
Entries = Mapping[str, Any]  # by path, with a `ShapeDtypeStruct` for each array


def named_leaves(path: str, parameter: Any) -> Iterator[tuple[str, Any]]:
    """Each array of a parameter by the name it is stored under."""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(parameter)[0]:
        yield path + "".join(f".{key.name}" for key in keys), leaf


def handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)


def restore(
    directory: Path,
    parameters: Mapping[str, Any],
    quantization: str | None,
    model: FunctionalModel,
    targets: Sequence[Target],
    *,
    keep_packed: bool,
    quantize: str | None,
    on_progress: Callable[[int], Any],
) -> Weights:
    """`load_weights` of a converted checkpoint, whose manifest has these `parameters`."""
    if quantize not in (None, quantization):
        raise CheckpointError(
            f"{directory}: was converted with quantize={quantization}; quantize={quantize} needs "
            f"another conversion: jaxinfer convert --quantize={quantize}"
        )
    found = checked(directory / MANIFEST_FILE, parameters, model)
    entries = {spec.path: entry for spec, entry in found}
    keeps = keep_packed or quantize is not None
    report = LoadReport()
    weights: list[Any] = []
    with ocp.Checkpointer(handler()) as checkpointer:
        for group in _groups(targets, entries):
            wanted = [_places(target, entries, keeps) for target in group]
            trees = {path: entries[path] for places in wanted for path in places}
            where = {path: place for places in wanted for path, place in places.items()}
            try:
                trees = _read(checkpointer, directory / ARRAYS_FOLDER, trees, where)
            # Orbax and TensorStore raise errors of many classes for what is missing or damaged.
            except Exception as error:
                raise CheckpointError(
                    f"{directory / ARRAYS_FOLDER}: cannot be restored ({error}); {CONVERT_AGAIN}"
                ) from error
            for target in group:
                own = {s.path: trees.pop(s.path) for s in target.sources if s.path in trees}
                weight = _placed(directory, target, own, entries, keeps, report)
                # Others were finite when they were converted.
                if _may_be_infinite(target, parameters):
                    _check_finite(directory, target.spec, weight)
                weights.append(weight)
                on_progress(target.nbytes)
    report.log(model, tuple(weights))
    return tuple(weights)


def _places(target: Target, entries: Entries, keeps: bool) -> dict[str, Any]:
    """Where each of the sources' arrays shall lie first, by path; None: on the host. Without those
    of which this process holds nothing."""
    if target.sharding is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        [source] = target.sources
        return {source.path: tree_shardings(entries[source.path], source, here)}
    if not _is_cut_as_stored(target, entries, keeps):
        return {s.path: jax.tree.map(lambda leaf: None, entries[s.path]) for s in target.sources}
    places = {}
    for stage, source in enumerate(target.sources):
        sharding = _stage_sharding(target, stage)
        if sharding.addressable_devices:
            places[source.path] = tree_shardings(entries[source.path], source, sharding)
    return places


def _is_cut_as_stored(target: Target, entries: Entries, keeps: bool) -> bool:
    """Whether the devices' slices are slices of what is stored."""
    if target.repeats is not None:
        return False
    found = [entries[source.path] for source in target.sources]
    if not any(isinstance(entry, Quantized) for entry in found):
        return True
    structures = {(jax.tree.structure(e), str(jax.tree.leaves(e))) for e in found}
    return keeps and len(structures) == 1 and is_divided(found[0], target.row_parts)


def _stage_sharding(target: Target, stage: int) -> NamedSharding:
    """Of one source over the devices of its stage."""
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


def _placed(
    directory: Path,
    target: Target,
    own: Mapping[str, Any],
    entries: Entries,
    keeps: bool,
    report: LoadReport,
) -> Any:
    """The parameter, of what was read of its sources."""
    first = target.sources[0]
    if target.sharding is None:
        weight = own[first.path]
        if isinstance(weight, Quantized) and not keeps:
            return dense(weight, first)
        return weight
    if _is_cut_as_stored(target, entries, keeps):
        return _joined(target, own, entries[first.path])
    if keeps:
        try:
            return place_whole(target, lambda i: own[target.sources[i].path])
        except Unpackable as why:
            report.add("dequantized", target.spec.path, str(why))
    pieces = []
    for stage, source in enumerate(target.sources):
        read = lambda source=source: _dense_on_host(own[source.path], source)
        index = (stage,) if target.is_stacked else ()
        pieces.append(Piece(f"{directory}: {source.path}", index, read))
    return place(target, pieces)


def _joined(target: Target, own: Mapping[str, Any], entry: Any) -> Any:
    """The sources' arrays, each on the devices of its stage, as one over all of them."""
    assert target.sharding is not None
    found = [jax.tree.leaves(tree) for tree in own.values()]
    leaves, structure = jax.tree.flatten(entry)
    where = jax.tree.leaves(tree_shardings(entry, target.spec, target.sharding))
    joined = []
    for i, (leaf, sharding) in enumerate(zip(leaves, where, strict=True)):
        arrays, shape = [leaves[i] for leaves in found], leaf.shape
        if target.is_stacked:
            arrays, shape = [jnp.expand_dims(a, 0) for a in arrays], (len(target.sources), *shape)
        held = {shard.device: shard.data for array in arrays for shard in array.addressable_shards}
        parts = [held[device] for device in owned_bounds(sharding, shape)]
        joined.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return jax.tree.unflatten(structure, joined)


def _dense_on_host(weight: Any, spec: ParameterSpec) -> np.ndarray:
    return np.asarray(dense(weight, spec) if isinstance(weight, Quantized) else weight)


def _may_be_infinite(target: Target, parameters: Mapping[str, Any]) -> bool:
    """Whether it is quantized, or of a type whose numbers can be too large for the model's."""
    most = float(jnp.finfo(target.spec.dtype).max)
    found = [parameters[source.path].get("dtype") for source in target.sources]
    return any(d is None or float(jnp.finfo(jnp.dtype(d)).max) > most for d in found)


def _check_finite(directory: Path, spec: ParameterSpec, weight: Any) -> None:
    """`CheckpointError` for NaN and infinity, of a quantized parameter in its scales."""
    for leaf in jax.tree.leaves(weight):
        is_wide = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1
        if is_wide and not jnp.isfinite(leaf).all():
            raise CheckpointError(
                f"{directory}: {spec.path} holds values that are NaN or infinite as {leaf.dtype}: "
                "the type is too narrow (try --set dtype=bfloat16), or the files are damaged: "
                f"{CONVERT_AGAIN}"
            )


def dense(weight: Quantized, spec: ParameterSpec) -> jax.Array:
    """The array that a quantized parameter stands for."""
    if isinstance(weight, QuantPair):
        return jnp.stack([dense(half, spec) for half in (weight.gate, weight.up)])
    order = None
    if isinstance(weight, QuantWeight):
        order, weight = weight.order, weight.weight
    matrix = dequantize(weight, spec.dtype)
    if order is not None:  # row d multiplies x's number order[d]
        matrix = jnp.take_along_axis(matrix, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    return matrix.T if spec.packs == "table" else matrix


def _read(
    checkpointer: ocp.Checkpointer,
    folder: Path,
    trees: Mapping[str, Any],
    where: Mapping[str, Any],
) -> dict[str, Any]:
    """The parameters by path, from what each of their arrays is and where it shall lie."""
    targets = dict(leaf for path, tree in trees.items() for leaf in named_leaves(path, tree))
    places = dict(leaf for path, tree in where.items() for leaf in named_leaves(path, tree))
    how = {name: _how(leaf, places.get(name)) for name, leaf in targets.items()}
    # Partial: the others are left where they are.
    args = ocp.args.PyTreeRestore(item=targets, restore_args=how, partial_restore=True)
    arrays = checkpointer.restore(folder.absolute(), args=args)
    return {
        path: jax.tree.unflatten(
            jax.tree.structure(tree), [arrays[name] for name, _ in named_leaves(path, tree)]
        )
        for path, tree in trees.items()
    }


def _how(leaf: Any, place: Sharding | None) -> ocp.RestoreArgs:
    if place is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(sharding=place, global_shape=leaf.shape, dtype=leaf.dtype)


def _groups(targets: Sequence[Target], entries: Entries) -> Iterator[list[Target]]:
    """Stretches of at least `GROUP_BYTES`, but for the last."""
    group: list[Target] = []
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
