"""Apply config.json's `quantization_config` to the tensors of a checkpoint.

A quantized checkpoint stores several tensors for a linear layer X (`X.qweight`, `X.scales`, ...).
`merge_quantized_layers` replaces them by one tensor `X.weight`, which can be read packed or
dequantized, so weight tables need no knowledge of quantization. Layers that were not quantized have
a plain `X.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxinfer.loading.checkpoint import CheckpointError, StoredTensor
from jaxinfer.loading.quantized import compressed_method, methods
from jaxinfer.loading.quantized.methods import Method
from jaxinfer.loading.quantized.rows import QuantRows

METHODS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Method, ...]]] = {
    "awq": methods.awq,
    "gptq": methods.gptq,
    "compressed-tensors": compressed_method.compressed_tensors,
    "fp8": methods.float8,
    "mxfp4": methods.mxfp4,
}
# Scales of a quantized cache: the engine's scales each token by itself.
CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".q_proj.output_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
# What a damaged configuration of the right names raises beside `ValueError`.
MALFORMED = (TypeError, AttributeError, KeyError, IndexError, ArithmeticError)
# What to do about the others.
WAYS_OUT = (
    "save the model unquantized (transformers: model.dequantize(), then save_pretrained), or fetch "
    "it before quantization or as a GGUF file; --set quantize=int8 or int4 quantizes such a one "
    "when it is loaded"
)


def merge_quantized_layers(
    directory: Path, tensors: Mapping[str, StoredTensor], config: Any, problems: list[str]
) -> dict[str, StoredTensor]:
    """The tensors, those of each quantized layer as one; `config` is the `quantization_config`.

    Of the methods of several groups a layer gets the nearest (`Method.rank`) that has all of its
    tensors there.
    What is refused, missing or misshapen is appended to `problems`; what only their numbers show
    is a `CheckpointError` when they are read.
    """
    if not isinstance(config, Mapping):
        problems.append(f"quantization_config is a JSON {type(config).__name__}, not an object")
        return dict(tensors)
    name = config.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        problems.append(
            f"quantization_config's quant_method is {name!r}; this build reads "
            f"{', '.join(METHODS)}: {WAYS_OUT}"
        )
        return dict(tensors)
    try:
        found = METHODS[name](config)
    except ValueError as error:
        problems.append(f"quantization_config of {name}: {error}; {WAYS_OUT}")
        return dict(tensors)
    except MALFORMED as error:
        problems.append(f"quantization_config of {name} is malformed ({error!r}); {WAYS_OUT}")
        return dict(tensors)
    merged = {n: t for n, t in tensors.items() if not n.endswith(CACHE_SCALES)}
    for layer, method in _methods_of_layers(tensors, found).items():
        _merge_layer(directory, method, layer, merged, problems)
    return merged


def _methods_of_layers(
    tensors: Mapping[str, StoredTensor], methods: tuple[Method, ...]
) -> dict[str, Method]:
    """The method of each quantized layer: one that lacks nothing, of those the nearest."""
    best: dict[str, tuple[tuple[bool, int], Method]] = {}
    for method in methods:
        for stored in tensors:
            if not stored.endswith(method.marker):
                continue
            layer = stored.removesuffix(method.marker)
            if (rank := method.rank(layer)) is None:
                continue
            lacks = any(layer + suffix not in tensors for suffix in method.required)
            if layer not in best or (lacks, rank) < best[layer][0]:
                best[layer] = (lacks, rank), method
    return {layer: method for layer, (_, method) in best.items()}


def _merge_layer(
    directory: Path,
    method: Method,
    layer: str,
    tensors: dict[str, StoredTensor],
    problems: list[str],
) -> None:
    """Replace a layer's tensors by one."""
    suffixes = (*method.required, *method.optional)
    parts = {suffix: tensors.pop(layer + suffix, None) for suffix in suffixes}
    missing = [layer + suffix for suffix in method.required if parts[suffix] is None]
    if missing:
        has = ", ".join(layer + suffix for suffix, part in parts.items() if part is not None)
        problems.append(f"{', '.join(missing)} is missing beside {has}")
        return
    there = {suffix: part for suffix, part in parts.items() if part is not None}
    try:
        shape = method.shape(there)
    except ValueError as error:
        problems.append(f"{layer}: {error}")
        return
    except MALFORMED as error:
        problems.append(f"{layer}: its tensors are malformed ({error!r})")
        return
    name = layer + method.merged
    read = partial(_read, f"{directory}: {layer}", method, there)
    tensors[name] = StoredTensor(
        name,
        shape,
        method.name,
        sum(part.nbytes for part in there.values()),
        lambda dtype: read().dequantize(dtype),
        read,
    )


def _read(where: str, method: Method, parts: Mapping[str, StoredTensor]) -> QuantRows:
    arrays = {suffix: part.read() for suffix, part in parts.items()}
    try:
        return method.read(arrays)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}; {WAYS_OUT}") from error
