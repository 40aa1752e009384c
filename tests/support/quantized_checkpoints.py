"""Tiny Llama checkpoints in every quantization format of Hugging Face directories.

The packers follow the formats' definitions and share no code with the readers: each one converts a
weight [out, in] to the stored tensors of its layer and the float64 weight that they represent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.tiny_checkpoints import TinyLlama, weights, write_checkpoint, write_safetensors

GROUP = 32
TINY = TinyLlama(hidden_size=64, intermediate_size=96, head_dim=16, num_layers=1, seed=3)
Tensors = dict[str, np.ndarray]
Packer = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]


@dataclass(frozen=True)
class Quantization:
    """A `quantization_config` of config.json, and the packer of its layers."""

    config: Mapping[str, Any]
    pack: Packer
    activations: str | None = field(default=None)


def int32_words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Pack [..., n] to [..., n bits / 32]; value order[i] (or i) goes to a word's i-th bits."""
    count = 32 // bits
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % count)])
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // count), np.uint64)
    for i in range(count):
        place = i if order is None else order[i]
        words |= padded[..., place::count].astype(np.uint64) << np.uint64(bits * i)
    return words.astype(np.uint32).view(np.int32)


def integers(
    w: np.ndarray, bits: int, group: int, has_zeros: bool, g_idx: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quantize w [out, in] to q in 0..2^bits - 1 [out, in], float16 scales and zeros [out, groups],
    and return also the weight that these represent."""
    g_idx = np.arange(w.shape[1]) // group if g_idx is None else g_idx
    num_groups, top = g_idx.max() + 1, 2**bits - 1
    scales = np.empty((len(w), num_groups), np.float16)
    zeros = np.empty((len(w), num_groups), np.int64)
    for j in range(num_groups):
        part = w[:, g_idx == j]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        if not has_zeros:
            high = np.maximum(high, -low)
            low = -high
        scales[:, j] = (high - low) / top
        zeros[:, j] = np.rint(-low / scales[:, j]) if has_zeros else 2 ** (bits - 1)
    s, z = scales[:, g_idx].astype(np.float64), zeros[:, g_idx]
    q = np.clip(np.rint(w / s) + z, 0, top).astype(np.int64)
    return q, scales, zeros, (q - z) * s


def awq(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    q, scales, zeros, true = integers(w, 4, GROUP, True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": int32_words(np.ascontiguousarray(q.T), 4, order),
        "qzeros": int32_words(np.ascontiguousarray(zeros.T), 4, order),
        "scales": np.ascontiguousarray(scales.T),
    }, true


def gptq(bits: int, has_zeros: bool, version: int, act_order: bool, group: int = GROUP) -> Packer:
    """Return the packer of GPTQ; `group` -1 puts all inputs in one group."""

    def pack(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        g_idx = np.arange(w.shape[1]) // (w.shape[1] if group == -1 else group)
        g_idx = rng.permutation(g_idx) if act_order else g_idx
        q, scales, zeros, true = integers(w, bits, group, has_zeros, g_idx)
        # Version 1 stores zero points minus one, so a zero point of 0 is impossible.
        if version == 1:
            assert zeros.min() > 0
        return {
            "qweight": int32_words(q, bits).T.copy(),
            "qzeros": int32_words(zeros.T - (version == 1), bits),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": g_idx.astype(np.int32),
            "bias": np.zeros(len(w), np.float16),  # AutoGPTQ writes it even without a bias
        }, true

    return pack


SCALES = ("weight_scale", "input_scale")


def plain(
    dtype: str,
    shape: str,
    input_scale: float | None = None,
    names: tuple[str, str] = SCALES,
    scale_dtype: Any = np.float32,
) -> Packer:
    """Return the packer of 8-bit values with a scale for each row or one for the tensor.

    `names` are the suffixes of the scale of the weight and of the scale of x.
    """

    def pack(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        top = 127 if dtype == "int8" else 448
        tops = abs(w).max(axis=1, keepdims=True) if shape == "row" else abs(w).max()
        scale = np.asarray(np.asarray(tops / top, scale_dtype), np.float64)
        scaled = np.clip(w / scale, -top, top).astype(np.float32)
        q = np.rint(scaled).astype(np.int8) if dtype == "int8" else scaled.astype(FLOAT8)
        # transformers writes a scalar, the other writers a list of one.
        shape_of_one = (1,) if names is SCALES else ()
        stored = scale.astype(scale_dtype)
        tensors = {
            "weight": q,
            names[0]: stored if shape == "row" else stored.reshape(shape_of_one),
        }
        if input_scale is not None:
            tensors[names[1]] = np.full(shape_of_one, input_scale, np.float32)
        return tensors, q.astype(np.float64) * scale

    return pack


def packed(bits: int, has_zeros: bool, act_order: bool = False) -> Packer:
    def pack(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        g_idx = np.arange(w.shape[1]) // GROUP
        g_idx = rng.permutation(g_idx) if act_order else g_idx
        q, scales, zeros, true = integers(w, bits, GROUP, has_zeros, g_idx)
        tensors = {
            "weight_packed": int32_words(q, bits),
            "weight_scale": scales,
            "weight_shape": np.array(w.shape, np.int64),
        }
        if has_zeros:
            tensors["weight_zero_point"] = int32_words(np.ascontiguousarray(zeros.T), bits).T.copy()
        if act_order:
            tensors["weight_g_idx"] = g_idx.astype(np.int32)
        return tensors, true

    return pack


def blocks(rows: int, columns: int, name: str = "weight_scale_inv") -> Packer:
    """Return the packer of float8 with a scale for each block; edge blocks are partial."""

    def pack(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        q, true = np.empty(w.shape, FLOAT8), np.empty(w.shape)
        tall, wide = (-(-n // size) for n, size in zip(w.shape, (rows, columns), strict=True))
        scales = np.empty((tall, wide), np.float32)
        for i in range(tall):
            for j in range(wide):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = abs(w[block]).max() / 448
                q[block] = (w[block] / scales[i, j]).astype(FLOAT8)
                true[block] = q[block].astype(np.float64) * scales[i, j]
        return {"weight": q, name: scales}, true

    return pack


FLOAT8 = ml_dtypes.float8_e4m3fn


def _gptq(bits: int, version: int, act_order: bool = False, group: int = GROUP) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _scheme(kind: str, strategy: str, bits: int = 8, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}


_BY_TOKEN = {"strategy": "token", "dynamic": True}
QUANTIZATIONS: dict[str, Quantization] = {
    "awq": Quantization(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        },
        awq,
    ),
    "gptq": Quantization(_gptq(4, 1), gptq(4, False, 1, False)),
    "gptq zeros, second format": Quantization(_gptq(4, 2), gptq(4, True, 2, False)),
    "gptq 8 bits": Quantization(_gptq(8, 1), gptq(8, False, 1, False)),
    "gptq, a group of all inputs": Quantization(
        _gptq(4, 1, group=-1), gptq(4, False, 1, False, group=-1)
    ),
    "gptq act-order": Quantization(_gptq(4, 1, True), gptq(4, False, 1, True)),
    "compressed int4": Quantization(
        compressed("pack-quantized", _scheme("int", "group", 4, group_size=GROUP)), packed(4, False)
    ),
    "compressed int4 zeros act-order": Quantization(
        compressed(
            "pack-quantized",
            _scheme("int", "group", 4, group_size=GROUP, symmetric=False, actorder="group"),
        ),
        packed(4, True, act_order=True),
    ),
    "compressed int8 weights": Quantization(
        compressed("pack-quantized", _scheme("int", "group", 8, group_size=GROUP)), packed(8, True)
    ),
    "compressed float8 weights": Quantization(
        compressed("naive-quantized", _scheme("float", "tensor")), plain("float8", "tensor")
    ),
    "blocks of float8": Quantization(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 64]}, blocks(48, 64)
    ),
    "compressed blocks of float8": Quantization(
        compressed(
            "float-quantized",
            _scheme("float", "block", block_structure=[48, 64]),
            _scheme("float", "group", group_size=64, dynamic=True),
        ),
        blocks(48, 64, "weight_scale"),
    ),
    "w8a8 int8": Quantization(
        compressed("int-quantized", _scheme("int", "channel"), _scheme("int", **_BY_TOKEN)),
        plain("int8", "row"),
        "int8",
    ),
    "w8a8 float8": Quantization(
        compressed("float-quantized", _scheme("float", "channel"), _scheme("float", **_BY_TOKEN)),
        plain("float8", "row", scale_dtype=ml_dtypes.bfloat16),
        "float8_e4m3fn",
    ),
    "w8a8 float8 static": Quantization(
        {"quant_method": "fp8", "activation_scheme": "static"},
        plain("float8", "tensor", input_scale=0.05),
        "float8_e4m3fn",
    ),
    "w8a8 float8 of transformers": Quantization(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        plain("float8", "tensor", 0.05, ("weight_scale_inv", "activation_scale")),
        "float8_e4m3fn",
    ),
}


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_quantized(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the checkpoint quantized by `QUANTIZATIONS[name]`, and its dequantized weights."""
    quantization, rng = QUANTIZATIONS[name], np.random.default_rng(0)
    stored, true = {}, {}
    for tensor_name, values in weights(TINY).items():
        if not is_quantized(tensor_name):
            stored[tensor_name] = true[tensor_name] = values
            continue
        tensors, weight = quantization.pack(values.astype(np.float64), rng)
        layer = tensor_name.removesuffix("weight")
        stored |= {layer + suffix: tensor for suffix, tensor in tensors.items()}
        true[tensor_name] = weight.astype(np.float32)
    quantized = write_checkpoint(TINY, folder / "quantized")
    write_safetensors(quantized / "model.safetensors", stored)
    set_quantization(quantized, quantization.config)
    plain_folder = write_checkpoint(TINY, folder / "plain")
    write_safetensors(plain_folder / "model.safetensors", true)
    return quantized, plain_folder


def set_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(config)})
    )
