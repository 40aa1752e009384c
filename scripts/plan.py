"""The planner: does a model fit a target, with how much cache, and how fast could it be at best?

    python scripts/plan.py --model=llama31_70b --target=v5e:4x4 --mesh=tensor=16 --context=8192
    python scripts/plan.py --model=PATH --target=h100:8 --search

The step of the engine is compiled for the target by its real compiler, on a CPU and without a
device, in the environment that `make compile-check` makes (.venv-compile); `--target=cpu:8` needs
no compiler, and is there to try it. Printed are the bytes on a device, the collectives of a step,
the tokens of cache, and the roofline of a decode step and of a prefill chunk
(`planner/roofline.py` has the formula, `targets/` the chips). Exits with 1 if it does not fit.

`--search` tries the meshes and quantizations that divide the model, by arithmetic, and compiles
the cheapest few.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from absl import app, flags
from compile_matrix import Target, load_matrix, load_target
from compile_run import ENVIRONMENT

# Before JAX is imported: no device is looked for.
os.environ.update({name: value for name, value in ENVIRONMENT.items() if value is not None})
os.environ.pop("TRITON_INTERPRET", None)

import jax
from compile_steps import StepProgram
from compile_target import Chip
from planner.models import Named, find_model
from planner.options import Asked, context_of, engine_config, mesh_sizes, quantization
from planner.plans import make_plan
from planner.report import as_json, as_text, search_json, search_text
from planner.search import search

from jaxinfer.config import EngineConfig
from jaxinfer.loading.quantize import RECIPES
from jaxinfer.options import ConfigError
from jaxinfer.sharding.mesh import MeshError

FLAGS = flags.FLAGS
MODEL = flags.DEFINE_string(
    "model", None, "[models] of compile_matrix.toml, a directory, a config.json, or a hub id."
)
TARGET = flags.DEFINE_string("target", None, "A chip of scripts/targets and its topology: v5e:4x4.")
MESH = flags.DEFINE_string("mesh", "", "Sizes of the mesh's axes, as pipe=2,tensor=8.")
QUANT = flags.DEFINE_string("quant", None, f"Weights: none, {', '.join(RECIPES)}.")
CONTEXT = flags.DEFINE_integer(
    "context", None, "Tokens of a request, prompt and output; by default the most, up to 8192."
)
ROWS = flags.DEFINE_integer("rows", None, "Requests at once, at most; 64 without a preset.")
CHUNK = flags.DEFINE_integer("chunk", None, "Tokens of a step, at most; 1024 without a preset.")
CONFIG = flags.DEFINE_string("config", None, "A preset or a .toml file to start from.")
SET = flags.DEFINE_multi_string("set", [], "Engine option, key.path=value; may be repeated.")
WHOLE = flags.DEFINE_boolean("whole", True, "Compile all layers; else a few, and arithmetic.")
SEARCH = flags.DEFINE_boolean("search", False, "Try meshes and quantizations.")
COMPILED = flags.DEFINE_integer("compiled", 3, "In a search: compile until so many fit.")
JSON = flags.DEFINE_string("json", None, "Also write everything that was found to this file.")

MODULES = {"tpu": ("libtpu",), "gpu": ("jax_plugins.xla_cuda12",), "cpu": ()}
SEARCHED = (None, "int8", "int4", "float8")  # w8a8 holds what int8 does


def asked() -> Asked:
    return Asked(
        CONFIG.value,
        MESH.value,
        QUANT.value,
        CONTEXT.value,
        ROWS.value,
        CHUNK.value,
        SET.value,
    )


def need_compiler(target: Target) -> None:
    """Leave, with what to do, where the target's compiler is not installed."""
    for module in MODULES[target.platform]:
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            sys.exit(
                f"plans for {target.name} need its compiler, which is not installed here: run "
                "`make compile-check` once, then .venv-compile/bin/python scripts/plan.py"
            )


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if not MODEL.value or not TARGET.value:
        raise app.UsageError("--model and --target are needed")
    if SEARCH.value and MESH.value:
        raise app.UsageError("--search tries every mesh: leave --mesh out, or --search")
    try:
        mesh_sizes(MESH.value)
        quantization(QUANT.value or "none")
        target = load_target(TARGET.value)
        matrix = load_matrix()
        name = MODEL.value
        if name in matrix["presets"]:  # its model, and its config unless another is given
            FLAGS["config"].value = CONFIG.value or name
            name = matrix["presets"][name]["model"]
        model = find_model(name, matrix["models"])
        config = engine_config(model, asked())
        need_compiler(target)
        if target.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", target.num_devices)
        text, found, fits = run(Chip(target), model, config)
    except (ConfigError, MeshError, ValueError) as error:
        sys.exit(f"plan: {error}")
    print(text)
    if JSON.value:
        Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if not fits:
        sys.exit(1)


def run(chip: Chip, model: Named, config: EngineConfig) -> tuple[str, Any, bool]:
    """What to print, what to write, and whether anything fits."""
    context = context_of(model, config, asked())
    if SEARCH.value:
        kinds = SEARCHED if QUANT.value is None else (quantization(QUANT.value),)
        found = search(chip, model, config, kinds, context, COMPILED.value)
        fits = any(not candidate.is_refused for candidate in found)
        return search_text(chip, model, context, found), search_json(found), fits
    program = StepProgram(chip, model, config)
    plan = make_plan(program, context, is_whole=WHOLE.value)
    return as_text(program, context, plan), as_json(program, context, plan), plan.fits


if __name__ == "__main__":
    app.run(main)
