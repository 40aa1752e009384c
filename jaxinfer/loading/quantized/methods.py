"""The quantization methods of Hugging Face checkpoints: what they store, and what is read of it.

Each function here takes the `quantization_config` and returns how such layers are read, or raises
`ValueError` naming the option that this build does not read.
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
class Method:
    """How a layer X is stored: the suffixes of its tensors, one of which, `marker`, tells that X is
    quantized. `shape` gives the shape of the weight, and raises `ValueError` for tensors that do
    not fit together; `read` the weight; `merged` is the suffix it gets. It is of the layers that
    `names` lists, of those whose names begin as one of `patterns`, and, `is_of_rest`, of all that
    no other method is nearer to.
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
    is_of_rest: bool = True

    def rank(self, layer: str) -> int | None:
        """How near it is to a layer, 0 nearest: by name, pattern or class; None: not of it."""
        if layer in self.names:
            return 0
        if any(pattern.match(layer) for pattern in self.patterns):
            return 1
        return 2 if self.is_of_rest else None


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under `name`, empty where there is none; `ValueError` for anything else."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; it must be an object")
    return value or {}


def check(found: Mapping[str, tuple[Any, Sequence[Any]]]) -> None:
    """`ValueError` for options whose value is none of those that are read."""
    wrong = [
        f"{name} is {value!r}; this build reads {' and '.join(map(repr, allowed))}"
        for name, (value, allowed) in found.items()
        if repr(value) not in map(repr, allowed)  # of JSON values: 4.0 is not 4
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def fit(parts: Parts, wanted: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
    """`ValueError` for tensors of other shapes."""
    wrong = [
        f"{parts[suffix].name} has shape {list(parts[suffix].shape)}; expected "
        f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}"
        for suffix, shapes in wanted.items()
        if suffix in parts and tuple(parts[suffix].shape) not in shapes
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _group_size(value: Any) -> int:
    """`value`; `ValueError` for what is neither a size nor -1, all inputs."""
    if type(value) is not int or value < -1 or value == 0:
        raise ValueError(f"group_size is {value!r}; it must be a whole number of at least 1, or -1")
    return value


def _groups(num_inputs: int, group_size: int) -> int:
    size = num_inputs if group_size == -1 else group_size
    if size < 1 or num_inputs % size:
        raise ValueError(f"groups of {group_size} do not divide its {num_inputs} inputs")
    return num_inputs // size


def matrix(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}; a matrix is expected")
    return tensor.shape[0], tensor.shape[1]


def awq(config: Mapping[str, Any]) -> tuple[Method, ...]:
    version = str(config.get("version", "gemm")).lower()
    check(
        {
            "bits": (config.get("bits", config.get("w_bit", 4)), (4,)),
            "version": (version, ("gemm",)),
            "backend": (config.get("backend", "autoawq"), ("autoawq",)),
            "zero_point": (config.get("zero_point", True), (True,)),
        }
    )
    group_size = _group_size(config.get("group_size", config.get("q_group_size", 128)))

    def shape(parts: Parts) -> tuple[int, ...]:
        D, words = matrix(parts[".qweight"])
        groups = _groups(D, group_size)
        fit(parts, {".qzeros": [(groups, words)], ".scales": [(groups, 8 * words)]})
        return 8 * words, D

    names = (".qweight", ".qzeros", ".scales")
    read = lambda a: read_awq(*(a[name] for name in names))
    return (Method("AWQ", ".qweight", names, shape, read),)


def gptq(config: Mapping[str, Any]) -> tuple[Method, ...]:
    version = config.get("checkpoint_format", "gptq")
    bits: Any = config.get("bits")
    check(
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
        words, F = matrix(parts[".qweight"])
        D = words * count
        groups = _groups(D, group_size)
        fit(
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
    return (Method("GPTQ", ".qweight", names, shape, read, optional=(".g_idx",)),)


def float8(config: Mapping[str, Any]) -> tuple[Method, ...]:
    """Of blocks (DeepSeek-V3, Qwen3), or with one scale a tensor and x quantized too."""
    activations = config.get("activation_scheme", "dynamic")
    check(
        {
            "activation_scheme": (activations, ("dynamic", "static")),
            "fmt": (config.get("fmt", "e4m3"), ("e4m3",)),
        }
    )
    block = config.get("weight_block_size")
    if block is not None:
        return (blocks(block, "weight_block_size", ".weight_scale_inv"),)
    # Transformers and other writers call the same two scales differently.
    spellings = ((".weight_scale", ".input_scale"), (".weight_scale_inv", ".activation_scale"))
    is_static = activations == "static"
    return tuple(plain("float8_e4m3fn", names, is_static=is_static) for names in spellings)


def blocks(size: Any, option: str, scale: str) -> Method:
    """float8 with a scale for each block of `size` [rows, columns], in the tensor `scale`.

    `ValueError` naming `option` for what is no size.
    """
    is_list = isinstance(size, list) and len(size) == 2
    if not is_list or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"{option} is {size!r}; it must be two whole numbers of at least 1")
    rows, columns = size

    def shape(parts: Parts) -> tuple[int, ...]:
        F, D = matrix(parts[".weight"])
        _check_type(parts, "F8_E4M3")
        fit(parts, {scale: [(-(-F // rows), -(-D // columns))]})
        return F, D

    read = lambda a: read_block_float8(a[".weight"], a[scale], (rows, columns))
    return Method("FP8", scale, (".weight", scale), shape, read)


def mxfp4(config: Mapping[str, Any]) -> tuple[Method, ...]:
    """Experts X [E, in, out], in `X_blocks` [E, out, groups, 16] and `X_scales`."""

    def shape(parts: Parts) -> tuple[int, ...]:
        blocks = tuple(parts["_blocks"].shape)
        if len(blocks) != 4 or blocks[3] != GROUP // 2:
            raise ValueError(f"_blocks has shape {list(blocks)}; expected [E, out, groups, 16]")
        fit(parts, {"_scales": [blocks[:3]]})
        return blocks[0], GROUP * blocks[2], blocks[1]

    names = ("_blocks", "_scales")
    read = lambda a: read_mxfp4(a["_blocks"], a["_scales"])
    return (Method("MXFP4", "_blocks", names, shape, read, merged=""),)


def _check_type(parts: Parts, wanted: str) -> None:
    if parts[".weight"].dtype != wanted:
        raise ValueError(f".weight is {parts['.weight'].dtype}; expected {wanted}")


def plain(
    dtype: str,
    names: tuple[str, str] = (".weight_scale", ".input_scale"),
    *,
    is_static: bool = False,
    is_weight_only: bool = False,
) -> Method:
    """8-bit values as they are, with a scale a tensor, a row, or a group; `names` are those of the
    scales of the weight and of x."""
    scale, input_scale = names

    def shape(parts: Parts) -> tuple[int, ...]:
        F, D = matrix(parts[".weight"])
        _check_type(parts, {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}[dtype])
        scales = tuple(parts[scale].shape)
        is_by_group = len(scales) == 2 and scales[0] == F and scales[1] and D % scales[1] == 0
        fit(
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
    return Method(f"{dtype} tensors", scale, required, shape, read, optional)
