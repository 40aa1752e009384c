"""From a checkpoint's tensors to a model's weights: names, shapes, types, all checked first."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.loading.checkpoint import Checkpoint, CheckpointError, StoredTensor
from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from jaxinfer.models.family import Transform, WeightTable
from jaxinfer.models.functional import FunctionalModel, ParameterSpec, Weights
from jaxinfer.nn.layers import Numerics

NUM_THREADS = 2  # tensors in flight: what peak host memory holds besides the weights


class Part(NamedTuple):
    """A stored tensor, the dimensions it has in its parameter, and where in that it stands."""

    tensor: StoredTensor
    dims: tuple[int, ...]
    target: Any  # an index of the parameter


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
    if config.num_layers > len(checkpoint.tensors):  # a claim of millions would take hours to build
        raise CheckpointError(
            f"{checkpoint.path}: claims {config.num_layers:,} layers, but holds "
            f"{len(checkpoint.tensors)} tensors; the configuration belongs to another model"
        )
    return FunctionalModel(family, config, numerics)


def load_weights(
    checkpoint: Checkpoint,
    model: FunctionalModel,
    *,
    on_progress: Callable[[int], Any] = lambda num_bytes: None,
) -> Weights:
    """The model's weights in its own order, one device array each, in the model's type.

    All missing, unexpected and misshapen tensors are named in one `CheckpointError`, before any is
    read. A weight with a NaN or an infinity is refused. Reads tensor by tensor from the memory
    map. `on_progress` gets the bytes of each parameter as it is done.
    """
    family = model.family
    weights_of: Any = family.gguf_weights if checkpoint.format == "gguf" else family.hf_weights
    sources = _match(checkpoint, model, weights_of(model.config))

    def load(spec: ParameterSpec, parts: list[Part], transform: Transform) -> jax.Array:
        buffer = _aligned_empty(spec.dims, spec.dtype)
        for tensor, dims, target in parts:
            values = np.asarray(transform.read(tensor.read(spec.dtype), dims))
            _fill(buffer[target], values, f"{checkpoint.path}: {tensor.name}")
        array = jax.device_put(buffer.reshape(spec.shape))
        on_progress(spec.nbytes)
        return array

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(load, *source) for source in sources]
        try:
            return tuple(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fill(buffer: np.ndarray, values: np.ndarray, name: str) -> None:
    """Copy values in the buffer's type; refuse those that are not finite in it."""
    # Summing finds NaN and infinity without a temporary of the tensor's size.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(buffer, values, casting="unsafe")
        if not np.isfinite(buffer.sum(dtype=np.float64)):
            bad = np.count_nonzero(~np.isfinite(buffer.astype(np.float32)))
            raise CheckpointError(
                f"{name} holds {bad} values that are NaN or infinite "
                f"as {buffer.dtype}: the file is damaged or was converted wrongly (fetch or "
                "convert it again), or the type is too narrow (try --set dtype=bfloat16)"
            )


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A buffer that jax on a CPU takes over as it is, being 64-byte aligned; another it would copy,
    and peak memory was 1.5 times the weights."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _match(
    checkpoint: Checkpoint, model: FunctionalModel, table: WeightTable
) -> list[tuple[ParameterSpec, list[Part], Transform]]:
    problems, sources, used = [], [], set()
    for spec in model.parameters:
        stored, transform = table.lookup(spec.path, spec.dims)
        is_whole = isinstance(stored, str)
        dims, parts = spec.dims if is_whole else spec.dims[1:], []
        for i, name in enumerate([stored] if is_whole else stored):
            used.add(name)
            tensor = checkpoint.tensors.get(name)
            if tensor is None:
                problems.append(f"{name} is missing (for {spec.path}, {list(dims)})")
                continue
            wanted = transform.stored_shape(dims)
            if tuple(tensor.shape) != tuple(wanted):
                problems.append(f"{name} has shape {list(tensor.shape)}; expected {list(wanted)}")
            parts.append(Part(tensor, dims, ... if is_whole else i))
        sources.append((spec, parts, transform))
    problems += [
        f"{name} {list(checkpoint.tensors[name].shape)} belongs to no parameter of "
        f"{model.family.name}"
        for name in checkpoint.tensors
        if name not in used and not table.is_ignored(name)
    ]
    if problems:
        raise CheckpointError.listing(checkpoint.path, problems)
    return sources
