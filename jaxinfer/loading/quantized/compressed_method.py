"""Read the `quantization_config` of the compressed-tensors library: a method for each layer group.

The layout of its files is in `compressed.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.loading.quantized.compressed import read_packed
from jaxinfer.loading.quantized.methods import (
    Parts,
    QuantMethod,
    blocks,
    check_options,
    check_shapes,
    get_object,
    matrix_shape,
    plain,
)
from jaxinfer.loading.quantized.rows import QuantRows

CLASS = "Linear"  # as a target, it selects all layers of this class
FORMATS = {
    "int-quantized": "int8",
    "float-quantized": "float8_e4m3fn",
    "naive-quantized": None,  # of the type of the values
    "pack-quantized": None,
}


def compressed_tensors(config: Mapping[str, Any]) -> tuple[QuantMethod, ...]:
    """Return the methods of the config's groups; raise `ValueError` for unsupported options."""
    groups = get_object(config, "config_groups")
    if not groups:
        raise ValueError("it has no config_groups")
    sparsity = get_object(config, "sparsity_config").get("format", "dense")
    others = dict(get_object(config, "transform_config"))
    transforms = others.pop("config_groups", {})
    check_options(
        {
            "sparsity_config's format": (sparsity, ("dense",)),
            # Rotations of x (Hadamard transforms), on which the weights depend.
            "transform_config": (transforms or others or None, (None,)),
        }
    )
    found = []
    for name in groups:
        group = get_object(groups, name)
        kind: Any = group.get("format") or config.get("format")
        check_options(
            {
                "format": (kind, tuple(FORMATS)),
                "output_activations": (group.get("output_activations"), (None,)),
            }
        )
        method = _group_method(kind, get_object(group, "weights"), group.get("input_activations"))
        found.append(dataclasses.replace(method, **_targets(group.get("targets", ["Linear"]))))
    return tuple(found)


def _targets(targets: Any) -> dict[str, Any]:
    """Return a `QuantMethod`'s target fields. Ignored layers are recognized by their tensors."""
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ValueError(f"targets is {targets!r}; it must be a list of names")
    try:
        patterns = tuple(re.compile(t.removeprefix("re:")) for t in targets if t.startswith("re:"))
    except re.error as error:
        raise ValueError(f"targets is {targets!r}; {error} in a regular expression") from error
    names = frozenset(targets) - {CLASS}
    return {"names": names, "patterns": patterns, "is_fallback": CLASS in targets}


def _group_method(
    kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> QuantMethod:
    """Return the method of a config group, from the schemes of its weights and activations."""
    values = (weights.get("type", "int"), weights.get("num_bits", 8))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    check_options({"weights' strategy": (strategy, ("channel", "tensor", "group", "block"))})
    if strategy == "block":
        return _block_method(kind, weights, activations)
    if kind == "pack-quantized":
        check_options(
            {
                "weights' type and num_bits": (values, (("int", 4), ("int", 8))),
                "input_activations": (activations, (None,)),
            }
        )
        return _packed_method(values[1])
    check_options({"weights' type and num_bits": (values, (("int", 8), ("float", 8)))})
    dtype = "int8" if values[0] == "int" else "float8_e4m3fn"
    check_options({"format": (kind, [k for k, t in FORMATS.items() if t in (None, dtype)])})
    if activations is None:
        return plain(dtype, is_weight_only=True)
    is_static = not activations.get("dynamic", False)
    check_options(
        {
            "input_activations' type and num_bits": (
                (activations.get("type", "int"), activations.get("num_bits", 8)),
                (values,),
            ),
            "input_activations' symmetric": (activations.get("symmetric", True), (True,)),
            "input_activations' strategy": (
                activations.get("strategy", "tensor" if is_static else "token"),
                ("tensor",) if is_static else ("token",),
            ),
        }
    )
    return plain(dtype, is_static=is_static)


def _block_method(
    kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> QuantMethod:
    """Return the method of float8 with a scale for each block; x is not quantized."""
    inputs = activations or {}
    check_options(
        {
            "format": (kind, [k for k, t in FORMATS.items() if t == "float8_e4m3fn"]),
            "weights' type": (weights.get("type"), ("float",)),
            "weights' num_bits": (weights.get("num_bits"), (8,)),
            "weights' symmetric": (weights.get("symmetric", True), (True,)),
            "input_activations' type": (inputs.get("type", "float"), ("float",)),
            "input_activations' num_bits": (inputs.get("num_bits", 8), (8,)),
            "input_activations' dynamic": (inputs.get("dynamic", True), (True,)),
        }
    )
    return blocks(weights.get("block_structure"), "weights' block_structure", ".weight_scale")


def _packed_method(bits: int) -> QuantMethod:
    """Return the method of integers packed in int32 along the inputs; x is not quantized."""
    count = 32 // bits

    def shape(parts: Parts) -> tuple[int, ...]:
        matrix_shape(parts[".weight_packed"])
        F, D = map(int, parts[".weight_shape"].read().reshape(-1)[:2])
        scales = tuple(parts[".weight_scale"].shape)
        groups = scales[1] if len(scales) == 2 else 1
        if groups < 1 or D % groups:
            raise ValueError(f"{groups} groups do not divide its {D} inputs")
        check_shapes(
            parts,
            {
                ".weight_packed": [(F, -(-D // count))],
                ".weight_scale": [(), (1,), (F,), (F, groups)],
                ".weight_zero_point": [scales, (-(-F // count), groups)],
                ".weight_g_idx": [(D,)],
            },
        )
        return F, D

    def read(arrays: Mapping[str, np.ndarray]) -> QuantRows:
        F, D = map(int, arrays[".weight_shape"].reshape(-1)[:2])
        return read_packed(
            arrays[".weight_packed"],
            arrays[".weight_scale"],
            (F, D),
            arrays.get(".weight_zero_point"),
            arrays.get(".weight_g_idx"),
            bits=bits,
        )

    required = (".weight_packed", ".weight_scale", ".weight_shape")
    optional = (".weight_zero_point", ".weight_g_idx")
    return QuantMethod(f"int{bits} tensors", ".weight_packed", required, shape, read, optional)
