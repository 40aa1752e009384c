"""The quantization methods of Hugging Face checkpoints, and how their layers are read.

Each function takes the `quantization_config` and returns the methods of its layers, or raises a
`ValueError` that names the unsupported option.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.loading.checkpoint import StoredTensor
from jaxinfer.loading.mxfp4 import GROUP, read_mxfp4
from jaxinfer.loading.quantized.compressed import read_plain
from jaxinfer.loading.quantized.floats import read_block_float8
from jaxinfer.loading.quantized.integers import read_awq, read_gptq
from jaxinfer.loading.quantized.rows import QuantRows

Parts = Mapping[str, StoredTensor]
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class QuantMethod:
    """How a quantized layer X is stored and read.

    Its tensors have the suffixes `required` and `optional`; a tensor with the suffix `marker`
    identifies a quantized layer. `shape` returns the shape of the weight and raises `ValueError` if
    the shapes of the tensors do not agree; `read` reads the weight, which is named X + `merged`.
    The method applies to the layers in `names`, to layers whose names match one of `patterns` at
    their start, and, if it `is_fallback`, to layers that no other method matches more closely.
    """

    name: str
    marker: str
    required: tuple[str, ...]
    shape: Callable[[Parts], tuple[int, ...]]
    read: Callable[[Arrays], QuantRows]
    optional: tuple[str, ...] = ()
    merged: str = ".weight"
    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    is_fallback: bool = True

    def rank(self, layer: str) -> int | None:
        """Return how closely it matches a layer: 0 by name, 1 by pattern, 2 by class, else None."""
        if layer in self.names:
            return 0
        if any(pattern.match(layer) for pattern in self.patterns):
            return 1
        return 2 if self.is_fallback else None


def get_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under `name`, or an empty one; raise `ValueError` for anything else."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; it must be an object")
    return value or {}


def check_options(found: Mapping[str, tuple[Any, Sequence[Any]]]) -> None:
    """Raise `ValueError` for options whose value is not one of the supported ones."""
    wrong = [
        f"{name} is {value!r}; this build reads {' and '.join(map(repr, allowed))}"
        for name, (value, allowed) in found.items()
        if repr(value) not in map(repr, allowed)  # compared as JSON: 4.0 is not 4
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_shapes(parts: Parts, expected: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
    """Raise `ValueError` for tensors whose shape is not one of the expected ones."""
    wrong = [
        f"{parts[suffix].name} has shape {list(parts[suffix].shape)}; expected "
        f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}"
        for suffix, shapes in expected.items()
        if suffix in parts and tuple(parts[suffix].shape) not in shapes
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _group_size(value: Any) -> int:
    """Check a group size: a positive number, or -1 for all inputs. Raises `ValueError`."""
    if type(value) is not int or value < -1 or value == 0:
        raise ValueError(f"group_size is {value!r}; it must be a whole number of at least 1, or -1")
    return value


def _num_groups(num_inputs: int, group_size: int) -> int:
    size = num_inputs if group_size == -1 else group_size
    if size < 1 or num_inputs % size:
        raise ValueError(f"groups of {group_size} do not divide its {num_inputs} inputs")
    return num_inputs // size


def matrix_shape(tensor: StoredTensor) -> tuple[int, int]:
    """Return the shape of a matrix; raise `ValueError` for another number of axes."""
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}; a matrix is expected")
    return tensor.shape[0], tensor.shape[1]


def awq(config: Mapping[str, Any]) -> tuple[QuantMethod, ...]:
    version = str(config.get("version", "gemm")).lower()
    check_options(
        {
            "bits": (config.get("bits", config.get("w_bit", 4)), (4,)),
            "version": (version, ("gemm",)),
            "backend": (config.get("backend", "autoawq"), ("autoawq",)),
            "zero_point": (config.get("zero_point", True), (True,)),
        }
    )
    group_size = _group_size(config.get("group_size", config.get("q_group_size", 128)))

    def shape(parts: Parts) -> tuple[int, ...]:
        D, words = matrix_shape(parts[".qweight"])
        groups = _num_groups(D, group_size)
        check_shapes(parts, {".qzeros": [(groups, words)], ".scales": [(groups, 8 * words)]})
        return 8 * words, D

    names = (".qweight", ".qzeros", ".scales")
    read = lambda a: read_awq(*(a[name] for name in names))
    return (QuantMethod("AWQ", ".qweight", names, shape, read),)


def gptq(config: Mapping[str, Any]) -> tuple[QuantMethod, ...]:
    version = config.get("checkpoint_format", "gptq")
    bits: Any = config.get("bits")
    check_options(
        {
            "bits": (bits, (4, 8)),
            "checkpoint_format": (version, ("gptq", "gptq_v2")),
            "is_marlin_format": (config.get("is_marlin_format", False), (False,)),
            "dynamic": (config.get("dynamic") or None, (None,)),
        }
    )
    group_size = _group_size(config.get("group_size", 128))
    count = 32 // bits  # values in an int32

    def shape(parts: Parts) -> tuple[int, ...]:
        words, F = matrix_shape(parts[".qweight"])
        D = words * count
        groups = _num_groups(D, group_size)
        check_shapes(
            parts,
            {
                ".qzeros": [(groups, F // count)],
                ".scales": [(groups, F)],
                ".g_idx": [(D,)],
            },
        )
        return F, D

    names = (".qweight", ".qzeros", ".scales")
    read = lambda a: read_gptq(
        a[".qweight"],
        a[".qzeros"],
        a[".scales"],
        a.get(".g_idx"),
        bits=bits,
        is_first_version=version == "gptq",
    )
    return (QuantMethod("GPTQ", ".qweight", names, shape, read, optional=(".g_idx",)),)


def float8(config: Mapping[str, Any]) -> tuple[QuantMethod, ...]:
    """Return the methods of `quant_method` "fp8".

    It has a scale for each block (DeepSeek-V3, Qwen3), or one for a tensor, and quantizes x too.
    """
    activations = config.get("activation_scheme", "dynamic")
    check_options(
        {
            "activation_scheme": (activations, ("dynamic", "static")),
            "fmt": (config.get("fmt", "e4m3"), ("e4m3",)),
        }
    )
    block = config.get("weight_block_size")
    if block is not None:
        return (blocks(block, "weight_block_size", ".weight_scale_inv"),)
    # transformers and other writers have different names for the same two scales.
    suffixes = ((".weight_scale", ".input_scale"), (".weight_scale_inv", ".activation_scale"))
    is_static = activations == "static"
    return tuple(plain("float8_e4m3fn", names, is_static=is_static) for names in suffixes)


def blocks(size: Any, option: str, scale: str) -> QuantMethod:
    """Return the method of float8 with a scale for each block of `size` [rows, columns].

    The scales are in the tensor `scale`. Raises a `ValueError` that names `option` if `size` is
    invalid.
    """
    is_list = isinstance(size, list) and len(size) == 2
    if not is_list or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"{option} is {size!r}; it must be two whole numbers of at least 1")
    rows, columns = size

    def shape(parts: Parts) -> tuple[int, ...]:
        F, D = matrix_shape(parts[".weight"])
        _check_type(parts, "F8_E4M3")
        check_shapes(parts, {scale: [(-(-F // rows), -(-D // columns))]})
        return F, D

    read = lambda a: read_block_float8(a[".weight"], a[scale], (rows, columns))
    return QuantMethod("FP8", scale, (".weight", scale), shape, read)


def mxfp4(config: Mapping[str, Any]) -> tuple[QuantMethod, ...]:
    """Return the method of experts X [E, in, out], in `X_blocks` [E, out, groups, 16] and
    `X_scales`."""

    def shape(parts: Parts) -> tuple[int, ...]:
        blocks = tuple(parts["_blocks"].shape)
        if len(blocks) != 4 or blocks[3] != GROUP // 2:
            raise ValueError(f"_blocks has shape {list(blocks)}; expected [E, out, groups, 16]")
        check_shapes(parts, {"_scales": [blocks[:3]]})
        return blocks[0], GROUP * blocks[2], blocks[1]

    names = ("_blocks", "_scales")
    read = lambda a: read_mxfp4(a["_blocks"], a["_scales"])
    return (QuantMethod("MXFP4", "_blocks", names, shape, read, merged=""),)


def _check_type(parts: Parts, expected: str) -> None:
    if parts[".weight"].dtype != expected:
        raise ValueError(f".weight is {parts['.weight'].dtype}; expected {expected}")


def plain(
    dtype: str,
    names: tuple[str, str] = (".weight_scale", ".input_scale"),
    *,
    is_static: bool = False,
    is_weight_only: bool = False,
) -> QuantMethod:
    """Return the method of 8-bit values with one scale for each tensor, row, or group.

    `names` are the suffixes of the scale of the weight and of the scale of x.
    """
    scale, input_scale = names

    def shape(parts: Parts) -> tuple[int, ...]:
        F, D = matrix_shape(parts[".weight"])
        _check_type(parts, {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}[dtype])
        scales = tuple(parts[scale].shape)
        is_by_group = len(scales) == 2 and scales[0] == F and scales[1] and D % scales[1] == 0
        check_shapes(
            parts,
            {
                scale: [(), (1,), (1, 1), (F,), (F, 1), *([scales] if is_by_group else [])],
                ".weight_zero_point": [scales],
                input_scale: [(), (1,)],
            },
        )
        return F, D

    required = (".weight", scale, *([input_scale] if is_static else []))
    optional = (".weight_zero_point", *([] if is_static else [input_scale]))
    activation_dtype = None if is_weight_only else dtype
    read = lambda a: read_plain(
        a[".weight"],
        a[scale],
        a.get(".weight_zero_point"),
        a[input_scale] if is_static else None,
        activation_dtype=activation_dtype,
    )
    return QuantMethod(f"{dtype} tensors", scale, required, shape, read, optional)
