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
from jaxinfer.loading.quantized.compressed import read_packed, read_plain
from jaxinfer.loading.quantized.floats import read_block_float8
from jaxinfer.loading.quantized.integers import read_awq, read_gptq
from jaxinfer.loading.quantized.rows import QuantRows

Parts = Mapping[str, StoredTensor]
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Method:
    """How a layer X is stored: the suffixes of its tensors, one of which, `marker`, tells that X is
    quantized. `shape` gives the shape of the weight, and raises `ValueError` for tensors that do
    not fit together; `read` the weight; `united` is the suffix it gets. `targets` are names of
    layers (regex), None of all.
    """

    name: str
    marker: str
    required: tuple[str, ...]
    shape: Callable[[Parts], tuple[int, ...]]
    read: Callable[[Arrays], QuantRows]
    optional: tuple[str, ...] = ()
    united: str = ".weight"
    targets: tuple[str, ...] | None = None

    def is_of(self, layer: str) -> bool:
        return self.targets is None or any(re.fullmatch(t, layer) for t in self.targets)


def _check(found: Mapping[str, tuple[Any, Sequence[Any]]]) -> None:
    """`ValueError` for options whose value is none of those that are read."""
    wrong = [
        f"{name} is {value!r}; this build reads {' and '.join(map(repr, allowed))}"
        for name, (value, allowed) in found.items()
        if value not in allowed
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _fit(parts: Parts, wanted: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
    """`ValueError` for tensors of other shapes."""
    wrong = [
        f"{parts[suffix].name} has shape {list(parts[suffix].shape)}; expected "
        f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}"
        for suffix, shapes in wanted.items()
        if suffix in parts and tuple(parts[suffix].shape) not in shapes
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _groups(num_inputs: int, group_size: int) -> int:
    size = num_inputs if group_size == -1 else group_size
    if size < 1 or num_inputs % size:
        raise ValueError(f"groups of {group_size} do not divide its {num_inputs} inputs")
    return num_inputs // size


def _matrix(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}; a matrix is expected")
    return tensor.shape[0], tensor.shape[1]


def awq(config: Mapping[str, Any]) -> tuple[Method, ...]:
    version = str(config.get("version", "gemm")).lower()
    _check(
        {
            "bits": (config.get("bits", config.get("w_bit", 4)), (4,)),
            "version": (version, ("gemm",)),
            "backend": (config.get("backend", "autoawq"), ("autoawq",)),
            "zero_point": (config.get("zero_point", True), (True,)),
        }
    )
    group_size = config.get("group_size", config.get("q_group_size", 128))

    def shape(parts: Parts) -> tuple[int, ...]:
        D, words = _matrix(parts[".qweight"])
        groups = _groups(D, group_size)
        _fit(parts, {".qzeros": [(groups, words)], ".scales": [(groups, 8 * words)]})
        return 8 * words, D

    names = (".qweight", ".qzeros", ".scales")
    read = lambda a: read_awq(*(a[name] for name in names))
    return (Method("AWQ", ".qweight", names, shape, read),)


def gptq(config: Mapping[str, Any]) -> tuple[Method, ...]:
    version = config.get("checkpoint_format", "gptq")
    bits: Any = config.get("bits")
    _check(
        {
            "bits": (bits, (4, 8)),
            "checkpoint_format": (version, ("gptq", "gptq_v2")),
            "is_marlin_format": (config.get("is_marlin_format", False), (False,)),
            "dynamic": (config.get("dynamic") or None, (None,)),
        }
    )
    group_size, count = config.get("group_size", 128), 32 // bits  # values in an int32

    def shape(parts: Parts) -> tuple[int, ...]:
        words, F = _matrix(parts[".qweight"])
        D = words * count
        groups = _groups(D, group_size)
        _fit(
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
    _check(
        {
            "activation_scheme": (activations, ("dynamic", "static")),
            "fmt": (config.get("fmt", "e4m3"), ("e4m3",)),
        }
    )
    block = config.get("weight_block_size")
    if block is None:
        return (_plain("float8_e4m3fn", is_static=activations == "static"),)
    rows, columns = block

    def shape(parts: Parts) -> tuple[int, ...]:
        F, D = _matrix(parts[".weight"])
        _fit(parts, {".weight_scale_inv": [(-(-F // rows), -(-D // columns))]})
        return F, D

    names = (".weight", ".weight_scale_inv")
    read = lambda a: read_block_float8(a[".weight"], a[".weight_scale_inv"], (rows, columns))
    return (Method("FP8", ".weight_scale_inv", names, shape, read),)


def mxfp4(config: Mapping[str, Any]) -> tuple[Method, ...]:
    """Experts X [E, in, out], in `X_blocks` [E, out, groups, 16] and `X_scales`."""

    def shape(parts: Parts) -> tuple[int, ...]:
        blocks = tuple(parts["_blocks"].shape)
        if len(blocks) != 4 or blocks[3] != GROUP // 2:
            raise ValueError(f"_blocks has shape {list(blocks)}; expected [E, out, groups, 16]")
        _fit(parts, {"_scales": [blocks[:3]]})
        return blocks[0], GROUP * blocks[2], blocks[1]

    names = ("_blocks", "_scales")
    read = lambda a: read_mxfp4(a["_blocks"], a["_scales"])
    return (Method("MXFP4", "_blocks", names, shape, read, united=""),)


FORMATS = {
    "int-quantized": "int8",
    "float-quantized": "float8_e4m3fn",
    "naive-quantized": None,  # by the type of the values
    "pack-quantized": None,
}


def compressed_tensors(config: Mapping[str, Any]) -> tuple[Method, ...]:
    groups = config.get("config_groups") or {}
    if not groups:
        raise ValueError("it has no config_groups")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    _check({"sparsity_config's format": (sparsity, ("dense",))})
    found = []
    for group in groups.values():
        kind: Any = group.get("format") or config.get("format")
        _check({"format": (kind, tuple(FORMATS))})
        targets = _targets(group.get("targets", ["Linear"]))
        method = _of_group(kind, group.get("weights") or {}, group.get("input_activations"))
        found.append(dataclasses.replace(method, targets=targets))
    return tuple(found)


def _targets(targets: Sequence[str]) -> tuple[str, ...] | None:
    """Names of layers (regex); None for the class of them, `Linear`. Which layers are ignored shows
    by their tensors."""
    if "Linear" in targets:
        return None
    return tuple(t.removeprefix("re:") if t.startswith("re:") else re.escape(t) for t in targets)


def _of_group(
    kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> Method:
    """One config group: the scheme of its weights and of their x."""
    values = (weights.get("type", "int"), weights.get("num_bits", 8))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    _check({"weights' strategy": (strategy, ("channel", "tensor", "group"))})
    if kind == "pack-quantized":
        _check(
            {
                "weights' type and num_bits": (values, (("int", 4), ("int", 8))),
                "input_activations": (activations, (None,)),
            }
        )
        return _packed(values[1])
    _check({"weights' type and num_bits": (values, (("int", 8), ("float", 8)))})
    dtype = "int8" if values[0] == "int" else "float8_e4m3fn"
    _check({"format": (kind, [k for k, t in FORMATS.items() if t in (None, dtype)])})
    if activations is None:
        return _plain(dtype, is_weight_only=True)
    is_static = not activations.get("dynamic", False)
    _check(
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
    return _plain(dtype, is_static=is_static)


def _plain(dtype: str, *, is_static: bool = False, is_weight_only: bool = False) -> Method:
    """8-bit values as they are, with a scale a tensor, a row, or a group."""

    def shape(parts: Parts) -> tuple[int, ...]:
        F, D = _matrix(parts[".weight"])
        wanted = {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}[dtype]
        if parts[".weight"].dtype != wanted:
            raise ValueError(f".weight is {parts['.weight'].dtype}; expected {wanted}")
        scales = tuple(parts[".weight_scale"].shape)
        is_by_group = len(scales) == 2 and scales[0] == F and scales[1] and D % scales[1] == 0
        _fit(
            parts,
            {
                ".weight_scale": [(), (1,), (F,), (F, 1), *([scales] if is_by_group else [])],
                ".weight_zero_point": [scales],
                ".input_scale": [(), (1,)],
            },
        )
        return F, D

    required = (".weight", ".weight_scale", *([".input_scale"] if is_static else []))
    optional = (".weight_zero_point", *([] if is_static else [".input_scale"]))
    activation_dtype = None if is_weight_only else dtype
    read = lambda a: read_plain(
        a[".weight"],
        a[".weight_scale"],
        a.get(".weight_zero_point"),
        a[".input_scale"] if is_static else None,
        activation_dtype=activation_dtype,
    )
    return Method(f"{dtype} tensors", ".weight_scale", required, shape, read, optional)


def _packed(bits: int) -> Method:
    """Integers in int32 along the inputs; weights alone."""
    count = 32 // bits

    def shape(parts: Parts) -> tuple[int, ...]:
        _matrix(parts[".weight_packed"])
        F, D = map(int, parts[".weight_shape"].read().reshape(-1)[:2])
        scales = tuple(parts[".weight_scale"].shape)
        groups = scales[1] if len(scales) == 2 else 1
        if groups < 1 or D % groups:
            raise ValueError(f"{groups} groups do not divide its {D} inputs")
        _fit(
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
