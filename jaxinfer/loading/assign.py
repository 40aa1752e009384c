"""From a checkpoint's tensors to a model's weights: names, shapes, types, all checked first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.loading.checkpoint import Checkpoint, CheckpointError, StoredTensor
from jaxinfer.loading.load_report import LoadReport
from jaxinfer.loading.packing import pack_parameter
from jaxinfer.loading.placement import Piece, place, whole
from jaxinfer.loading.quantize import Recipe, can_quantize, quantize_parameter, recipe_of
from jaxinfer.loading.quantized.rows import QuantRows
from jaxinfer.loading.splitting import Unpackable, place_whole
from jaxinfer.loading.targets import Target, own_model, targets_of
from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from jaxinfer.models.family import Transform, WeightTable
from jaxinfer.models.functional import FunctionalModel, ParameterSpec, Weights
from jaxinfer.models.hf_config import MAX_LAYERS
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.quantized import Quantized

if TYPE_CHECKING:
    from jaxinfer.parallel.sharded_model import ShardedModel

# Parameters in flight: what peak host memory holds besides the weights.
NUM_THREADS = min(8, os.cpu_count() or 1)


class Part(NamedTuple):
    """A stored tensor, the dimensions it has in its parameter, and where in that it stands."""

    tensor: StoredTensor
    dims: tuple[int, ...]
    item: int | None  # of the parameter's first axis; None: it is the parameter


class Stored(NamedTuple):
    """A parameter of the model, and the tensors that hold it."""

    spec: ParameterSpec
    parts: list[Part]
    transform: Transform


def functional_model(checkpoint: Checkpoint, numerics: Numerics) -> FunctionalModel:
    """The model that the checkpoint describes; `CheckpointError` for an unknown architecture or
    hyperparameters that do not hold together."""
    if checkpoint.format == "gguf":
        key, families = "general.architecture", GGUF_FAMILIES
    else:
        key, families = "model_type", HF_FAMILIES
    name = checkpoint.metadata.get(key)
    family = families.get(name) if isinstance(name, str) else None
    if family is None:
        raise CheckpointError(
            f"{checkpoint.path}: {key} is {name!r}; this build runs {', '.join(sorted(families))}"
        )
    read: Any = family.config_from_gguf if checkpoint.format == "gguf" else family.config_from_hf
    try:
        config = read(checkpoint.metadata, checkpoint.tensors)
    except (ValueError, TypeError, ArithmeticError, KeyError) as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    # A claim of millions would take hours to build; without tensors, weights are to be random.
    most = len(checkpoint.tensors) or MAX_LAYERS
    if config.num_layers > most:
        raise CheckpointError(
            f"{checkpoint.path}: claims {config.num_layers:,} layers, but holds "
            f"{len(checkpoint.tensors)} tensors; the configuration belongs to another model (with "
            f"random weights it may have {MAX_LAYERS:,})"
        )
    return FunctionalModel(family, config, numerics)


def load_weights(
    checkpoint: Checkpoint,
    model: FunctionalModel | ShardedModel,
    *,
    keep_packed: bool = False,
    quantize: str | None = None,
    on_progress: Callable[[int], Any] = lambda num_bytes: None,
) -> Weights:
    """The model's weights in its own order, on its devices, in its type.

    Of a `ShardedModel` each device gets its own slices, and where they are plain numbers no more
    than these is read. `keep_packed` leaves quantized weights as they are, where a product takes
    them so: then they are of `nn.quantized.Quantized`. `quantize` (a key of `quantize.RECIPES`)
    quantizes products' weights that are not. What became of them is logged: what cannot be
    quantized, as where a mesh would split a group's rows too often, is a plain array.

    All missing, unexpected and misshapen tensors are named in one `CheckpointError`, before any
    weight is read. A weight with a NaN or an infinity is refused. Reads tensor by tensor from the
    memory map. `on_progress` gets the bytes of each parameter, in the model's type, as it is done.
    """
    own, targets = own_model(model), targets_of(model)
    if checkpoint.restore is not None:
        how = {"keep_packed": keep_packed, "quantize": quantize}
        return checkpoint.restore(own, targets, **how, on_progress=on_progress)
    family = own.family
    weights_of: Any = family.gguf_weights if checkpoint.format == "gguf" else family.hf_weights
    stored = _match(checkpoint, own, weights_of(own.config))
    recipe = None if quantize is None else recipe_of(quantize)
    reader = _Reader(checkpoint.path, stored, keep_packed, recipe)

    def load(target: Target) -> Any:
        weight = reader.load(target)
        on_progress(target.nbytes)
        return weight

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(load, target) for target in targets]
        try:
            weights = tuple(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    reader.report.log(own, weights)
    return weights


class _Reader:
    """Parameters out of stored tensors; several threads read at once."""

    def __init__(
        self, path: Path, stored: Mapping[str, Stored], keep_packed: bool, recipe: Recipe | None
    ):
        self.path = path
        self.stored = stored
        self.keep_packed = keep_packed
        self.recipe = recipe
        self.report = LoadReport()

    def load(self, target: Target) -> Any:
        sources = [self.stored[spec.path] for spec in target.sources]
        is_packable = any(part.tensor.is_packable for source in sources for part in source.parts)
        if self.keep_packed and is_packable:
            try:
                return place_whole(target, lambda i: self._read_packed(sources[i]))
            except Unpackable as why:
                self.report.add("dequantized", target.spec.path, str(why))
        recipe = self.recipe
        if recipe is not None and can_quantize(target.sources[0], recipe):
            try:
                return place_whole(target, lambda i: self._quantized(sources[i], recipe))
            except Unpackable as why:
                self.report.add("not quantized", target.spec.path, str(why))
        pieces = []
        for stage, source in enumerate(sources):
            pieces += self._pieces(source, (stage,) if target.is_stacked else ())
        return place(target, pieces)

    def _pieces(self, source: Stored, at: tuple[int, ...] = ()) -> list[Piece]:
        """The tensors as the numbers of their parts of the parameter, which stands `at` a stage."""
        spec, parts, transform = source

        def piece(part: Part) -> Piece:
            read = lambda: transform.read(part.tensor.read(spec.dtype), part.dims)
            index = at if part.item is None else (*at, part.item)
            return Piece(f"{self.path}: {part.tensor.name}", index, read)

        return [piece(part) for part in parts]

    def _quantized(self, source: Stored, recipe: Recipe) -> Quantized:
        spec = source.spec
        array = whole(spec.shape, spec.dtype, self._pieces(source))
        quantized = quantize_parameter(spec, array, recipe)
        self.report.note_activations(spec.path, recipe.activation_dtype, quantized)
        return quantized

    def _read_packed(self, source: Stored) -> Quantized:
        """The parameter as it is stored; `Unpackable` where it cannot be."""
        spec, parts, transform = source
        if spec.packs is None:
            raise Unpackable("it is no product's weight")
        rows: list[QuantRows] = []
        for part in parts:
            stored = part.tensor.read_packed()
            if stored is None:
                raise Unpackable(f"{part.tensor.name} is stored as {part.tensor.dtype}")
            if not stored.is_finite():
                raise CheckpointError(
                    f"{self.path}: {part.tensor.name} has scales that are NaN or infinite: the "
                    "file is damaged or was converted wrongly (fetch or convert it again)"
                )
            rows.append(stored)
        packed = pack_parameter(spec, rows, transform, parts[0].dims)
        self.report.note_activations(spec.path, rows[0].activation_dtype, packed)
        return packed


def _match(checkpoint: Checkpoint, model: FunctionalModel, table: WeightTable) -> dict[str, Stored]:
    """By path."""
    problems, found, used = [], {}, set()
    tensors: dict[str, StoredTensor] = {}
    for tensor in checkpoint.tensors.values():
        first = tensors.setdefault(table.known_name(tensor.name), tensor)
        if first is not tensor:
            problems.append(f"{first.name} and {tensor.name} are both the same parameter's")
    for spec in model.parameters:
        stored, transform = table.lookup(spec.path, spec.dims, tensors)
        is_whole = isinstance(stored, str)
        dims, parts = spec.dims if is_whole else spec.dims[1:], []
        for i, name in enumerate([stored] if is_whole else stored):
            used.add(name)
            tensor = tensors.get(name)
            if tensor is None:
                problems.append(f"{name} is missing (for {spec.path}, {list(dims)})")
                continue
            wanted = transform.stored_shape(dims)
            if tuple(tensor.shape) != tuple(wanted):
                problems.append(f"{name} has shape {list(tensor.shape)}; expected {list(wanted)}")
            parts.append(Part(tensor, dims, None if is_whole else i))
        found[spec.path] = Stored(spec, parts, transform)
    problems += [
        f"{tensor.name} {list(tensor.shape)} belongs to no parameter of {model.family.name}"
        for name, tensor in tensors.items()
        if name not in used and not table.is_ignored(name) and not _is_idle(name, tensors)
    ]
    if problems:
        raise CheckpointError.listing(checkpoint.path, problems)
    return found


def _is_idle(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether it is a bias of zeros beside a quantized weight: AutoGPTQ writes one for each layer,
    of models that have none."""
    layer = name.removesuffix(".bias")
    weight = tensors.get(f"{layer}.weight")
    if layer == name or weight is None or not weight.is_packable:
        return False
    return not tensors[name].read().any()
