"""Encode and check the parameters in the manifest of a converted checkpoint (`orbax.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.kv_pages import QUANTIZED
from jaxinfer.kernels.quantized_matmul import QuantArray
from jaxinfer.loading.checkpoint import CheckpointError
from jaxinfer.loading.splitting import device_dtype
from jaxinfer.models.functional import FunctionalModel, ParameterSpec
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight

QUANTIZED_CLASSES = {cls.__name__: cls for cls in get_args(Quantized)}
CONVERT_AGAIN = "convert the model again with jaxinfer convert --overwrite"


def encode_parameter(value: Any) -> Any:
    """Encode a parameter as JSON: an array, or a tree of arrays with its class and its fields."""
    if type(value).__name__ in QUANTIZED_CLASSES:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {
            "class": type(value).__name__,
            "fields": {name: encode_parameter(field) for name, field in fields.items()},
        }
    if isinstance(value, jax.Array):
        return {"shape": list(value.shape), "dtype": value.dtype.name}
    return value


def _decode_parameter(entry: Any) -> Any:
    """Decode an entry to a parameter that has a `ShapeDtypeStruct` for each array."""
    if not isinstance(entry, Mapping):
        return entry
    if "class" in entry:
        fields = {name: _decode_parameter(field) for name, field in entry["fields"].items()}
        return QUANTIZED_CLASSES[entry["class"]](**fields)
    return jax.ShapeDtypeStruct(tuple(entry["shape"]), jnp.dtype(entry["dtype"]))


def check_parameters(
    manifest: Path, parameters: Mapping[str, Any], model: FunctionalModel
) -> list[tuple[ParameterSpec, Any]]:
    """Decode the manifest's `parameters`, in the model's order, and check them against the model.

    Each array becomes a `ShapeDtypeStruct` with the type that it has on the devices. Raises one
    `CheckpointError` that names all missing, unknown, damaged and misshapen parameters.
    """
    problems = [
        f"{path} belongs to no parameter of {model.family.name}"
        for path in parameters.keys() - {spec.path for spec in model.parameters}
    ]
    entries = []
    for spec in model.parameters:
        try:
            entry = _decode_parameter(parameters[spec.path])
            problems += _shape_problems(spec, entry)
            entries.append((spec, _with_device_dtypes(spec, entry)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{spec.path} is missing or damaged ({error!r})")
    if problems:
        problems.append(f"another version converted it, or it is damaged: {CONVERT_AGAIN}")
        raise CheckpointError.listing(manifest, problems)
    return entries


def _with_device_dtypes(spec: ParameterSpec, entry: Any) -> Any:
    if isinstance(entry, jax.ShapeDtypeStruct):
        return entry.update(dtype=spec.dtype)
    return jax.tree.map(lambda leaf: leaf.update(dtype=device_dtype(leaf.dtype)), entry)


def _shape_problems(spec: ParameterSpec, entry: Any) -> list[str]:
    if isinstance(entry, jax.ShapeDtypeStruct):
        _check_floating(entry)
        shape, expected = entry.shape, spec.shape
    elif spec.packs is None:
        raise ValueError("it is quantized, but is not the weight of a matmul")
    elif isinstance(entry, QuantPair):
        shapes = [_checked_shape(half) for half in (entry.gate, entry.up)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"gate and up have shapes {shapes[0]} and {shapes[1]}")
        shape, expected = (2, *shapes[0]), spec.shape
    else:
        shape = _checked_shape(entry)
        expected = spec.shape[::-1] if spec.packs == "table" else spec.shape
    if shape != expected:
        return [f"{spec.path} has shape {list(shape)}; expected {list(expected)}"]
    return []


def _check_floating(array: Any) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"it is {array.dtype}; a floating type is expected")


def _checked_shape(entry: Any) -> tuple[int, ...]:
    """Return the shape [*E, D, F] of a quantized matrix; raise `ValueError` if it is invalid."""
    if isinstance(entry, QuantWeight):
        shape = _checked_shape(entry.weight)
        order, x_scale = entry.order, entry.x_scale
        if order is not None and (order.shape, order.dtype) != (shape[-2:-1], np.int32):
            raise ValueError(f"order is {order.dtype} {order.shape}; it must be int32 {shape[-2]}")
        if x_scale is not None and x_scale.shape != ():
            raise ValueError(f"x_scale has shape {x_scale.shape}; it must be a number")
        if entry.activation_dtype not in (None, *QUANTIZED):
            raise ValueError(f"activation_dtype is {entry.activation_dtype!r}")
        return shape
    if not isinstance(entry, QuantArray):
        raise ValueError(f"it is {entry!r}, not a parameter")
    entry.check()
    _check_floating(entry.scales)
    return (*entry.values.shape[:-2], entry.num_rows, entry.num_columns)
