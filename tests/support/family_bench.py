"""Tiny random checkpoints of every model family, for comparison with transformers.

A case is a `config.json`. `tests/references/make_family_references.py` records the names and shapes
of the tensors that transformers saves, and logits. The values of the tensors are generated here,
with the same bytes on every machine, so that the recorded logits can be compared without PyTorch.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from tests.support.paths import REFERENCES

REFERENCES = REFERENCES / "families"
VOCAB_SIZE = 160
# Keys that most families share; a case overrides what differs.
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class GgufForm:
    """How llama.cpp's converter writes the case.

    `metadata` has keys without the architecture. `change(name, values)` returns the tensors to
    write in place of a tensor, by Hugging Face names.
    """

    architecture: str
    metadata: Mapping[str, Any]
    change: Callable[[str, np.ndarray], Tensors] = lambda name, values: {name: values}


@dataclass(frozen=True)
class FamilyCase:
    """A case: `config` overrides `COMMON` (None removes a key); `nulls` are keys that are null."""

    config: Mapping[str, Any]
    gguf: GgufForm | None = None
    seed: int = 0
    sequence_lens: tuple[int, ...] = (20, 50)
    generation: Mapping[str, Any] = field(default_factory=dict)
    norm_mean: float = 1.0  # mean of the norms' weights; 0 if the model adds 1 to them
    nulls: tuple[str, ...] = ()

    @property
    def config_json(self) -> dict[str, Any]:
        given = {key: v for key, v in (COMMON | dict(self.config)).items() if v is not None}
        return given | dict.fromkeys(self.nulls)

    def sequences(self) -> list[list[int]]:
        """Return random token ids of `sequence_lens`, without special tokens."""
        generator = np.random.PCG64(1000 + self.seed)
        vocab_size = self.config_json["vocab_size"]
        return [
            [3 + int(raw >> np.uint64(32)) % (vocab_size - 3) for raw in generator.random_raw(n)]
            for n in self.sequence_lens
        ]


@functools.cache
def recorded(group: str) -> dict[str, Any]:
    """Return the group's JSON: for each case the config, tensor shapes and recorded sequences."""
    return json.loads((REFERENCES / f"{group}.json").read_text("utf-8"))["cases"]


def make_tensors(shapes: Mapping[str, Any], seed: int, norm_mean: float = 1.0) -> Tensors:
    """Return float32 tensors with these shapes, by name; uniform, from raw PCG64 words."""
    made = {name: _values(name, tuple(shape), seed) for name, shape in sorted(shapes.items())}
    shift = np.float32(norm_mean - 1.0)
    is_norm = lambda name: len(shapes[name]) == 1 and name.endswith("weight")
    return {name: values + shift if is_norm(name) else values for name, values in made.items()}


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    raw = np.random.PCG64(zlib.crc32(name.encode()) + seed).random_raw(math.prod(shape))
    unit = ((raw >> np.uint64(40)).astype(np.float32) - 2.0**23) * np.float32(2.0**-23)
    mean, half_width = _spread(name, shape)
    return (unit * np.float32(half_width) + np.float32(mean)).reshape(shape)


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and half width, large enough that a wrong rotation, mask or route changes the
    logits by far more than rounding does."""
    if len(shape) == 1:
        return (1.0, 0.4) if name.endswith("weight") else (0.0, 0.5)
    if "embed" in name or ".wte." in name or ".wpe." in name or name.endswith("bias"):
        return 0.0, 1.0 if name.endswith("weight") else 0.5
    is_output_last = ".c_" in name or len(shape) == 3  # GPT-2's, and stacked experts
    num_inputs = shape[-2] if is_output_last else shape[-1]
    gain = 3.0 if name.endswith(("gate.weight", "router.weight")) else 1.2
    return 0.0, gain * (3 / num_inputs) ** 0.5


def write_huggingface(case: FamilyCase, tensors: Tensors, folder: Path) -> Path:
    """Write a Hugging Face directory without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config_json), "utf-8")
    if case.generation:
        (folder / "generation_config.json").write_text(json.dumps(case.generation), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf(case: FamilyCase, tensors: Tensors, path: Path) -> Path:
    """Write the case as a float32 GGUF file, with the names of the `gguf` package's map."""
    form = case.gguf
    assert form is not None
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == form.architecture)
    names = gguf.get_tensor_name_map(arch, case.config_json.get("num_hidden_layers", 2))
    writer = gguf.GGUFWriter(path, form.architecture)
    for key, value in form.metadata.items():
        _add(
            writer,
            key if "." in key and key.startswith("general.") else f"{form.architecture}.{key}",
            value,
        )
    changed: Tensors = {}
    for name, values in tensors.items():
        changed |= form.change(name, values)
    for name, values in _with_stacked_experts(changed).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"{name} has no name in a GGUF file of {form.architecture}"
        writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with_stacked_experts(tensors: Tensors) -> Tensors:
    """Stack `...experts.3.gate_proj.weight` of all experts as `...experts.gate_proj.weight`."""
    stacked: dict[str, dict[int, np.ndarray]] = {}
    others: Tensors = {}
    for name, values in tensors.items():
        before, found, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if found and number.isdecimal():
            stacked.setdefault(f"{before}.experts.{rest}", {})[int(number)] = values
        else:
            others[name] = values
    joined = {name: np.stack([by[i] for i in range(len(by))]) for name, by in stacked.items()}
    return others | joined


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    by_type: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    kind = next((kind for kind in by_type if isinstance(value, kind)), None)
    (writer.add_array if kind is None else by_type[kind])(key, value)


def paired(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows of q or k in the order that the converter of Llama-like models writes."""
    rows = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)
