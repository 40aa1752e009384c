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
from jaxinfer.loading.quantized.methods import QuantMethod
from jaxinfer.loading.quantized.rows import QuantRows

METHODS: Mapping[str, Callable[[Mapping[str, Any]], tuple[QuantMethod, ...]]] = {
    "awq": methods.awq,
    "gptq": methods.gptq,
    "compressed-tensors": compressed_method.compressed_tensors,
    "fp8": methods.float8,
    "mxfp4": methods.mxfp4,
}
# Scales of a quantized KV cache, which are ignored: the engine computes a scale for each token.
CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".q_proj.output_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
# Errors besides `ValueError` that a malformed configuration causes.
MALFORMED = (TypeError, AttributeError, KeyError, IndexError, ArithmeticError)
REMEDIES = (
    "save the model unquantized (transformers: model.dequantize(), then save_pretrained), or fetch "
    "it before quantization or as a GGUF file; --set quantize=int8 or int4 quantizes such a one "
    "when it is loaded"
)


def merge_quantized_layers(
    directory: Path, tensors: Mapping[str, StoredTensor], config: Any, problems: list[str]
) -> dict[str, StoredTensor]:
    """Merge the tensors of each quantized layer into one; `config` is the `quantization_config`.

    If several methods match a layer, it gets the closest one (`QuantMethod.rank`) whose tensors are
    all present. Unsupported options and missing or misshapen tensors are appended to `problems`;
    errors that only the values show are raised as `CheckpointError` when they are read.
    """
    if not isinstance(config, Mapping):
        problems.append(f"quantization_config is a JSON {type(config).__name__}, not an object")
        return dict(tensors)
    name = config.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        problems.append(
            f"quantization_config's quant_method is {name!r}; this build reads "
            f"{', '.join(METHODS)}: {REMEDIES}"
        )
        return dict(tensors)
    try:
        found = METHODS[name](config)
    except ValueError as error:
        problems.append(f"quantization_config of {name}: {error}; {REMEDIES}")
        return dict(tensors)
    except MALFORMED as error:
        problems.append(f"quantization_config of {name} is malformed ({error!r}); {REMEDIES}")
        return dict(tensors)
    merged = {n: t for n, t in tensors.items() if not n.endswith(CACHE_SCALES)}
    for layer, method in _choose_methods(tensors, found).items():
        _merge_layer(directory, method, layer, merged, problems)
    return merged


def _choose_methods(
    tensors: Mapping[str, StoredTensor], methods: tuple[QuantMethod, ...]
) -> dict[str, QuantMethod]:
    """Choose each quantized layer's method: complete ones first, then the closest."""
    best: dict[str, tuple[tuple[bool, int], QuantMethod]] = {}
    for method in methods:
        for stored in tensors:
            if not stored.endswith(method.marker):
                continue
            layer = stored.removesuffix(method.marker)
            if (rank := method.rank(layer)) is None:
                continue
            is_incomplete = any(layer + suffix not in tensors for suffix in method.required)
            if layer not in best or (is_incomplete, rank) < best[layer][0]:
                best[layer] = (is_incomplete, rank), method
    return {layer: method for layer, (_, method) in best.items()}


def _merge_layer(
    directory: Path,
    method: QuantMethod,
    layer: str,
    tensors: dict[str, StoredTensor],
    problems: list[str],
) -> None:
    """Replace a layer's tensors by one tensor."""
    suffixes = (*method.required, *method.optional)
    parts = {suffix: tensors.pop(layer + suffix, None) for suffix in suffixes}
    missing = [layer + suffix for suffix in method.required if parts[suffix] is None]
    if missing:
        found = ", ".join(layer + suffix for suffix, part in parts.items() if part is not None)
        problems.append(f"{', '.join(missing)} is missing, although the file has {found}")
        return
    present = {suffix: part for suffix, part in parts.items() if part is not None}
    try:
        shape = method.shape(present)
    except ValueError as error:
        problems.append(f"{layer}: {error}")
        return
    except MALFORMED as error:
        problems.append(f"{layer}: its tensors are malformed ({error!r})")
        return
    name = layer + method.merged
    read = partial(_read, f"{directory}: {layer}", method, present)
    tensors[name] = StoredTensor(
        name,
        shape,
        method.name,
        sum(part.nbytes for part in present.values()),
        lambda dtype: read().dequantize(dtype),
        read,
    )


def _read(where: str, method: QuantMethod, parts: Mapping[str, StoredTensor]) -> QuantRows:
    arrays = {suffix: part.read() for suffix, part in parts.items()}
    try:
        return method.read(arrays)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}; {REMEDIES}") from error
