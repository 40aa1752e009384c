"""For tests of the planner: chips whose devices are mere names, a compiler that answers from a
table, and tiny models by their config."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxinfer.config import from_mapping
from jaxinfer.tools.compile_gate import matrix as compile_matrix
from jaxinfer.tools.compile_gate import steps as compile_steps
from jaxinfer.tools.compile_gate import target as compile_target
from jaxinfer.tools.planner import models, options
from tests.support.paths import ROOT

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
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 512,
    "vocab_size": 512,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
EIGHT_LAYERS = LLAMA | {"num_hidden_layers": 8}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
# `quantization_config`, and the recipe that it is planned by.
QUANTIZED: list[Any] = [
    ({"quant_method": "gptq", "bits": 4}, "int4"),
    ({"quant_method": "gptq", "bits": 8}, "int8"),
    ({"quant_method": "awq", "w_bit": 4}, "int4"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "float8"),
    ({"quant_method": "mxfp4"}, "int8"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "weights": {"type": "float", "num_bits": 8},
                    "input_activations": {"type": "float", "num_bits": 8},
                }
            },
        },
        "float8_w8a8",
    ),
]
# Those that the engine refuses, and why.
UNREAD: list[Any] = [
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes'; this build reads awq, gptq"),
    ("int4", "a JSON str, not an object"),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3; this build reads 4 and 8"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": 5}}, "g is 5"),
    (
        {"quant_method": "compressed-tensors", "format": "int-quantized"}
        | {"config_groups": {"g": {"weights": "x"}}},
        "weights is 'x'",
    ),
]


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
    model = models.model_from_table("tiny", table)
    asked = {"context": 128, "rows": 4, "chunk": 32} | asked
    config = options.engine_config(model, options.PlanRequest(**asked))
    return compile_steps.StepProgram(chip(monkeypatch, name), model, config)


def on_cpus(count: int, table: dict[str, Any], config: dict[str, Any]) -> Any:
    """A tiny model's step on so many devices of this process, which really compile it."""
    place = compile_target.Chip(compile_matrix.load_target(f"cpu:{count}"))
    model = models.model_from_table("tiny", table)
    return compile_steps.StepProgram(place, model, from_mapping(config))


def on_four_chips(table: dict[str, Any], limit: int) -> Any:
    """A chip of so much memory, a model, a config."""
    with pytest.MonkeyPatch.context() as patch:
        place = chip(patch, "v5e:2x2")
    place.target = dataclasses.replace(place.target, memory_bytes=limit)
    model = models.model_from_table("tiny", table)
    return (
        place,
        model,
        options.engine_config(model, options.PlanRequest(context=128, rows=4, chunk=32)),
    )


def small(step: Any, limit: int) -> Any:
    step.chip.target = dataclasses.replace(step.chip.target, memory_bytes=limit)
    return step


KIB = 1024
SUM = "%s.{} = bf16[512]{{0}} all-reduce(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%a"
TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[512]) -> bf16[512] {{
  %x = bf16[512]{{0}} parameter(0)
{sums}
}}
"""


class Answers:
    """Stands in for a compiler: temporaries, and two sums a layer and one beside."""

    def __init__(self, temporaries: int = KIB, refuses_layers: int = 99):
        self.temporaries, self.refuses_layers = temporaries, refuses_layers
        self.asked: list[tuple[int, int, int]] = []  # layers, bucket, pages

    def __call__(self, step: Any, bucket: int, num_pages: int) -> Any:
        self.asked.append((step.num_layers, bucket, num_pages))
        if step.num_layers >= self.refuses_layers:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 17.74G of 15.75G hbm\nmore")
        per_stage = step.num_layers // step.model.num_stages
        sums = "\n".join("  " + SUM.format(i) for i in range(2 * per_stage + 1))
        memory = {
            "arguments": step.weight_bytes + num_pages * step.page_bytes + KIB,
            "results": 0,
            "temporaries": self.temporaries,
            "code": 0,
        }
        return SimpleNamespace(memory=lambda: memory, text=TEXT.format(sums=sums))


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/plan.py", *args]
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | quick, capture_output=True, text=True, timeout=300
    )


CHILD = """
import contextlib, io, json, sys
from jaxinfer.cli import plan
from jaxinfer.cli.main import parse_flags
from absl.testing import flagsaver

for flag in json.loads(sys.argv[1]):
    said = io.StringIO()
    with flagsaver.flagsaver(), contextlib.redirect_stderr(said):
        try:
            given = ["plan", "--model=llama31_70b", "--target=cpu:2", "--search", flag]
            code = plan.main(parse_flags(given))
        except SystemExit as leaving:
            code = leaving.code
    print(json.dumps([code, said.getvalue()]))
"""


def answers_to(flags: list[str]) -> list[tuple[int, str]]:
    """The exit code and stderr of the script for each, all in one process."""
    command = [sys.executable, "-c", CHILD, json.dumps(flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
