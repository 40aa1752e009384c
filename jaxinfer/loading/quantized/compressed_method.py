"""The `quantization_config` of the compressed-tensors library: its groups of layers, each a method.

What its files hold is in `compressed.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.loading.quantized.compressed import read_packed
from jaxinfer.loading.quantized.methods import (
    Method,
    Parts,
    blocks,
    check,
    fit,
    matrix,
    plain,
    section,
)

CLASS = "Linear"  # as a target: the layers of this class
FORMATS = {
    "int-quantized": "int8",
    "float-quantized": "float8_e4m3fn",
    "naive-quantized": None,  # by the type of the values
    "pack-quantized": None,
}


def compressed_tensors(config: Mapping[str, Any]) -> tuple[Method, ...]:
    groups = section(config, "config_groups")
    if not groups:
        raise ValueError("it has no config_groups")
    sparsity = section(config, "sparsity_config").get("format", "dense")
    transforms = section(config, "transform_config").get("config_groups", {})
    others = {k: v for k, v in section(config, "transform_config").items() if k != "config_groups"}
    check(
        {
            "sparsity_config's format": (sparsity, ("dense",)),
            # Rotations of x (Hadamard), without which the weights mean something else.
            "transform_config": (transforms or others or None, (None,)),
        }
    )
    found = []
    for name in groups:
        group = section(groups, name)
        kind: Any = group.get("format") or config.get("format")
        check(
            {
                "format": (kind, tuple(FORMATS)),
                "output_activations": (group.get("output_activations"), (None,)),
            }
        )
        method = _of_group(kind, section(group, "weights"), group.get("input_activations"))
        found.append(dataclasses.replace(method, **_targets(group.get("targets", ["Linear"]))))
    return tuple(found)


def _targets(targets: Any) -> dict[str, Any]:
    """`Method`'s fields. Which layers are ignored shows by their tensors."""
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ValueError(f"targets is {targets!r}; it must be a list of names")
    try:
        patterns = tuple(re.compile(t.removeprefix("re:")) for t in targets if t.startswith("re:"))
    except re.error as error:
        raise ValueError(f"targets is {targets!r}; {error} in a regular expression") from error
    names = frozenset(targets) - {CLASS}
    return {"names": names, "patterns": patterns, "is_of_rest": CLASS in targets}


def _of_group(
    kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> Method:
    """One config group: the scheme of its weights and of their x."""
    values = (weights.get("type", "int"), weights.get("num_bits", 8))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    check({"weights' strategy": (strategy, ("channel", "tensor", "group", "block"))})
    if strategy == "block":
        return _blocks(kind, weights, activations)
    if kind == "pack-quantized":
        check(
            {
                "weights' type and num_bits": (values, (("int", 4), ("int", 8))),
                "input_activations": (activations, (None,)),
            }
        )
        return _packed(values[1])
    check({"weights' type and num_bits": (values, (("int", 8), ("float", 8)))})
    dtype = "int8" if values[0] == "int" else "float8_e4m3fn"
    check({"format": (kind, [k for k, t in FORMATS.items() if t in (None, dtype)])})
    if activations is None:
        return plain(dtype, is_weight_only=True)
    is_static = not activations.get("dynamic", False)
    check(
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


def _blocks(kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Method:
    """float8 with a scale for each block, and x, as that of DeepSeek-V3, as it is."""
    by = activations or {}
    check(
        {
            "format": (kind, [k for k, t in FORMATS.items() if t == "float8_e4m3fn"]),
            "weights' type": (weights.get("type"), ("float",)),
            "weights' num_bits": (weights.get("num_bits"), (8,)),
            "weights' symmetric": (weights.get("symmetric", True), (True,)),
            "input_activations' type": (by.get("type", "float"), ("float",)),
            "input_activations' num_bits": (by.get("num_bits", 8), (8,)),
            "input_activations' dynamic": (by.get("dynamic", True), (True,)),
        }
    )
    return blocks(weights.get("block_structure"), "weights' block_structure", ".weight_scale")


def _packed(bits: int) -> Method:
    """Integers in int32 along the inputs; weights alone."""
    count = 32 // bits

    def shape(parts: Parts) -> tuple[int, ...]:
        matrix(parts[".weight_packed"])
        F, D = map(int, parts[".weight_shape"].read().reshape(-1)[:2])
        scales = tuple(parts[".weight_scale"].shape)
        groups = scales[1] if len(scales) == 2 else 1
        if groups < 1 or D % groups:
            raise ValueError(f"{groups} groups do not divide its {D} inputs")
        fit(
            parts,
            {
                ".weight_packed": [(F, -(-D // count))],
                ".weight_scale": [(), (1,), (F,), (F, groups)],
                ".weight_zero_point": [scales, (-(-F // count), groups)],
                ".weight_g_idx": [(D,)],
            },
        )
        return F, D

    read = lambda a: read_packed(
        a[".weight_packed"],
        a[".weight_scale"],
        tuple(map(int, a[".weight_shape"].reshape(-1)[:2])),  # type: ignore[arg-type]
        a.get(".weight_zero_point"),
        a.get(".weight_g_idx"),
        bits=bits,
    )
    required = (".weight_packed", ".weight_scale", ".weight_shape")
    optional = (".weight_zero_point", ".weight_g_idx")
    return Method(f"int{bits} tensors", ".weight_packed", required, shape, read, optional)
