"""For tests of the planner: chips whose devices are mere names, and tiny models by their config."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

# Scripts are run, not installed; they find each other by their folder.
compile_matrix: Any = importlib.import_module("compile_matrix")
compile_target: Any = importlib.import_module("compile_target")
compile_steps: Any = importlib.import_module("compile_steps")
models: Any = importlib.import_module("planner.models")
options: Any = importlib.import_module("planner.options")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@dataclasses.dataclass(frozen=True)
class NamedDevice:
    """All that shapes and shardings ask of a device. As a CPU's they stand in order in any mesh."""

    id: int
    platform: str = "cpu"
    device_kind: str = "none"
    process_index: int = 0


def chip(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Of a target, without its compiler: nothing can be compiled for it."""
    target = compile_matrix.load_target(name)
    devices = [NamedDevice(i) for i in range(target.num_devices)]
    monkeypatch.setattr(compile_target, "_devices", lambda target: devices)
    return compile_target.Chip(target)


def program(monkeypatch: pytest.MonkeyPatch, name: str, table: dict[str, Any], **asked: Any) -> Any:
    """A tiny model's step on such a chip."""
    model = models.from_table("tiny", table)
    asked = {"context": 128, "rows": 4, "chunk": 32} | asked
    config = options.engine_config(model, options.Asked(**asked))
    return compile_steps.StepProgram(chip(monkeypatch, name), model, config)
