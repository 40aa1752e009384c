"""What config.json's `quantization_config` says, and the layers it is about.

Such a checkpoint keeps several tensors of a linear layer X (`X.qweight`, `X.scales`, ...). `unite`
puts one tensor `X.weight` in their place, which can be read packed or dequantized, so that weight
tables know nothing of quantization. Layers that a checkpoint left alone have a plain `X.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxinfer.loading.checkpoint import StoredTensor
from jaxinfer.loading.quantized import methods
from jaxinfer.loading.quantized.methods import Method
from jaxinfer.loading.quantized.rows import QuantRows

METHODS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Method, ...]]] = {
    "awq": methods.awq,
    "gptq": methods.gptq,
    "compressed-tensors": methods.compressed_tensors,
    "fp8": methods.float8,
    "mxfp4": methods.mxfp4,
}
# What to do about the others.
WAYS_OUT = (
    "save the model unquantized (transformers: model.dequantize(), then save_pretrained), or fetch "
    "it before quantization or as a GGUF file; --set quantize=int8 or int4 quantizes such a one "
    "when it is loaded"
)


def unite(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], problems: list[str]
) -> dict[str, StoredTensor]:
    """The tensors, those of each quantized layer as one; `config` is the `quantization_config`.

    What is refused, missing or misshapen is appended to `problems`.
    """
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
    # Scales for a quantized cache: the engine's cache scales each token by itself.
    united = {n: t for n, t in tensors.items() if not n.endswith((".k_scale", ".v_scale"))}
    for method in found:
        for stored in tensors:
            if stored.endswith(method.marker) and stored in united:
                layer = stored.removesuffix(method.marker)
                if method.is_of(layer):
                    _unite_layer(method, layer, united, problems)
    return united


def _unite_layer(
    method: Method, layer: str, tensors: dict[str, StoredTensor], problems: list[str]
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
    name = layer + method.united
    read = partial(_read, method, there)
    tensors[name] = StoredTensor(
        name,
        shape,
        method.name,
        sum(part.nbytes for part in there.values()),
        lambda dtype: read().dequantize(dtype),
        read,
    )


def _read(method: Method, parts: Mapping[str, StoredTensor]) -> QuantRows:
    return method.read({suffix: part.read() for suffix, part in parts.items()})
