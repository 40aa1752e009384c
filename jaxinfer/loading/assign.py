"""Load a checkpoint's tensors as a model's weights; names, shapes and types are checked first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.loading.checkpoint import Checkpoint, CheckpointError, StoredTensor
from jaxinfer.loading.load_report import LoadReport
from jaxinfer.loading.packing import pack_parameter
from jaxinfer.loading.placement import Piece, assemble, place
from jaxinfer.loading.quantize import Recipe, can_quantize, get_recipe, quantize_parameter
from jaxinfer.loading.quantized.rows import QuantRows
from jaxinfer.loading.splitting import UnpackableError, place_whole
from jaxinfer.loading.targets import LoadTarget, load_targets, single_device_model
from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from jaxinfer.models.family import Transform, WeightTable
from jaxinfer.models.functional import FunctionalModel, ParameterSpec, Weights
from jaxinfer.models.hf_config import MAX_LAYERS
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.quantized import Quantized
from jaxinfer.parallel.sharded_model import ShardedModel

# Parameters in flight: host memory peaks at this many of them besides the weights.
NUM_THREADS = min(8, os.cpu_count() or 1)


class StoredPart(NamedTuple):
    """A stored tensor that is a parameter, or one item of a parameter's first axis."""

    tensor: StoredTensor
    dims: tuple[int, ...]  # the dimensions that it has in the parameter
    item: int | None  # its index along the parameter's first axis; None: it is the whole parameter


class StoredParameter(NamedTuple):
    """A parameter of the model, and the tensors that contain it."""

    spec: ParameterSpec
    parts: list[StoredPart]
    transform: Transform


def functional_model(checkpoint: Checkpoint, numerics: Numerics) -> FunctionalModel:
    """Build the model that the checkpoint describes.

    Raises `CheckpointError` for an unknown architecture or inconsistent hyperparameters.
    """
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
    # Millions of layers would take hours to build. Without tensors, the weights will be random.
    max_layers = len(checkpoint.tensors) or MAX_LAYERS
    if config.num_layers > max_layers:
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
    """Load the model's weights, in the order of its parameters, on its devices and in its type.

    Each device of a `ShardedModel` gets its own slices, and of unquantized tensors only these
    slices are read. `keep_packed` keeps quantized weights quantized wherever a matmul takes them:
    those are `nn.quantized.Quantized`. `quantize` (a key of `quantize.RECIPES`) quantizes the
    matmul weights that are not quantized. Weights that cannot be quantized, for example because a
    mesh would split a group of rows too often, become plain arrays, and the log says so.

    Raises one `CheckpointError` that names all missing, unexpected and misshapen tensors, before
    any weight is read, or one for a weight with a NaN or an infinity. Tensors are read one by one
    from the memory map. `on_progress` is called with the bytes of each loaded parameter, counted in
    the model's type.
    """
    base, targets = single_device_model(model), load_targets(model)
    if checkpoint.restore is not None:
        return checkpoint.restore(
            base, targets, keep_packed=keep_packed, quantize=quantize, on_progress=on_progress
        )
    family = base.family
    make_table: Any = family.gguf_weights if checkpoint.format == "gguf" else family.hf_weights
    stored = _match(checkpoint, base, make_table(base.config))
    recipe = None if quantize is None else get_recipe(quantize)
    reader = _Reader(checkpoint.path, stored, keep_packed, recipe)

    def load(target: LoadTarget) -> Any:
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
    reader.report.log(base, weights)
    return weights


class _Reader:
    """Reads parameters from stored tensors. Safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, StoredParameter],
        keep_packed: bool,
        recipe: Recipe | None,
    ):
        self.path = path
        self.stored = stored
        self.keep_packed = keep_packed
        self.recipe = recipe
        self.report = LoadReport()

    def load(self, target: LoadTarget) -> Any:
        sources = [self.stored[spec.path] for spec in target.sources]
        is_packable = any(part.tensor.is_packable for source in sources for part in source.parts)
        if self.keep_packed and is_packable:
            try:
                return place_whole(target, lambda i: self._read_packed(sources[i]))
            except UnpackableError as why:
                self.report.add("dequantized", target.spec.path, str(why))
        recipe = self.recipe
        if recipe is not None and can_quantize(target.sources[0], recipe):
            try:
                return place_whole(target, lambda i: self._quantized(sources[i], recipe))
            except UnpackableError as why:
                self.report.add("not quantized", target.spec.path, str(why))
        pieces = []
        for stage, source in enumerate(sources):
            pieces += self._pieces(source, (stage,) if target.is_stacked else ())
        return place(target, pieces)

    def _pieces(self, source: StoredParameter, at: tuple[int, ...] = ()) -> list[Piece]:
        """Return the pieces of a parameter, which is at index `at` of a stacked one."""
        spec, parts, transform = source

        def piece(part: StoredPart) -> Piece:
            read = lambda: transform.read(part.tensor.read(spec.dtype), part.dims)
            index = at if part.item is None else (*at, part.item)
            return Piece(f"{self.path}: {part.tensor.name}", index, read)

        return [piece(part) for part in parts]

    def _quantized(self, source: StoredParameter, recipe: Recipe) -> Quantized:
        spec = source.spec
        array = assemble(spec.shape, spec.dtype, self._pieces(source))
        quantized = quantize_parameter(spec, array, recipe)
        self.report.note_activations(spec.path, recipe.activation_dtype, quantized)
        return quantized

    def _read_packed(self, source: StoredParameter) -> Quantized:
        """Read a parameter in its stored quantization; raise `UnpackableError` if it has none."""
        spec, parts, transform = source
        if spec.packs is None:
            raise UnpackableError("it is not the weight of a matmul")
        rows: list[QuantRows] = []
        for part in parts:
            stored = part.tensor.read_packed()
            if stored is None:
                raise UnpackableError(f"{part.tensor.name} is stored as {part.tensor.dtype}")
            if not stored.is_finite():
                raise CheckpointError(
                    f"{self.path}: {part.tensor.name} has scales that are NaN or infinite: the "
                    "file is damaged or was converted wrongly (fetch or convert it again)"
                )
            rows.append(stored)
        packed = pack_parameter(spec, rows, transform, parts[0].dims)
        self.report.note_activations(spec.path, rows[0].activation_dtype, packed)
        return packed


def _match(
    checkpoint: Checkpoint, model: FunctionalModel, table: WeightTable
) -> dict[str, StoredParameter]:
    """Find the tensors of each parameter, by parameter path."""
    problems, found, used = [], {}, set()
    tensors: dict[str, StoredTensor] = {}
    for tensor in checkpoint.tensors.values():
        first = tensors.setdefault(table.known_name(tensor.name), tensor)
        if first is not tensor:
            problems.append(f"{first.name} and {tensor.name} belong to the same parameter")
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
            expected = transform.stored_shape(dims)
            if tuple(tensor.shape) != tuple(expected):
                problems.append(f"{name} has shape {list(tensor.shape)}; expected {list(expected)}")
            parts.append(StoredPart(tensor, dims, None if is_whole else i))
        found[spec.path] = StoredParameter(spec, parts, transform)
    problems += [
        f"{tensor.name} {list(tensor.shape)} belongs to no parameter of {model.family.name}"
        for name, tensor in tensors.items()
        if name not in used and not table.is_ignored(name) and not _is_zero_bias(name, tensors)
    ]
    if problems:
        raise CheckpointError.listing(checkpoint.path, problems)
    return found


def _is_zero_bias(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether it is a bias of zeros that belongs to a quantized weight.

    AutoGPTQ writes one for each layer, even of models without biases.
    """
    layer = name.removesuffix(".bias")
    weight = tensors.get(f"{layer}.weight")
    if layer == name or weight is None or not weight.is_packable:
        return False
    return not tensors[name].read().any()
