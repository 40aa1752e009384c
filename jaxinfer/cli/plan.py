"""The planner: does a model fit a target, with how much cache, and how fast could it be at best?

    python scripts/plan.py --model=llama31_70b --target=v5e:4x4 --mesh=tensor=16 --context=8192
    python scripts/plan.py --model=PATH --target=h100:8 --search

The step of the engine is compiled for the target by its real compiler, on a CPU and without a
device, in the environment that `make compile-check` makes (.venv-compile); `--target=cpu:8` needs
no compiler, and is there to try it. Printed are the bytes on a device, the collectives of a step,
the tokens of cache, and the roofline of a decode step and of a prefill chunk
(`planner/roofline.py` has the formula, `targets/` the chips). What is being compiled is said on
stderr. Exits with 0 where it fits, with 1 where it does not (of a search: where nothing does), and
with 2 where nothing could be planned: wrong options, no such model, no compiler.

`--search` tries the meshes that divide the model and the quantizations (of `--quant`, a `quantize`
that is set, or one of the preset or checkpoint, that one alone), by arithmetic, and compiles the
cheapest few.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxinfer.tools.compile_gate.matrix import Target, load_matrix
from jaxinfer.tools.compile_gate.run import ENVIRONMENT

# Before JAX is imported: no device is looked for.
os.environ.update({name: value for name, value in ENVIRONMENT.items() if value is not None})
os.environ.pop("TRITON_INTERPRET", None)

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.loading.quantize import RECIPES
from jaxinfer.options import ConfigError
from jaxinfer.sharding.mesh import MeshError
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import first_reason
from jaxinfer.tools.planner.models import Named, find_model
from jaxinfer.tools.planner.options import (
    Asked,
    context_of,
    engine_config,
    kinds_of,
    mesh_sizes,
    quantization,
    target_of,
)
from jaxinfer.tools.planner.plans import make_plan, step_program
from jaxinfer.tools.planner.report import as_json, as_text, search_json, search_text
from jaxinfer.tools.planner.search import search

FLAGS = flags.FLAGS
MODEL = flags.DEFINE_string(
    "model",
    None,
    "[models] of compile_matrix.toml, a directory, a config.json, a .gguf file, a hub id, or demo.",
)
TARGET = flags.DEFINE_string(
    "target", None, "A chip of jaxinfer/tools/targets and its topology: v5e:4x4."
)
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
SEARCH = flags.DEFINE_boolean("search", False, "Try meshes and, where none is set, quantizations.")
COMPILED = flags.DEFINE_integer(
    "compiled", 3, "In a search: compile until so many fit.", lower_bound=1
)
JSON = flags.DEFINE_string("json", None, "Also write everything that was found to this file.")

MODULES = {"tpu": ("libtpu",), "gpu": ("jax_plugins.xla_cuda12",), "cpu": ()}


def asked() -> Asked:
    return Asked(
        CONFIG.value,
        MESH.value,
        QUANT.value,
        CONTEXT.value,
        ROWS.value,
        CHUNK.value,
        SET.value,
        SEARCH.value,
    )


def need_compiler(target: Target) -> None:
    """`ValueError`, with what to do, where the target's compiler is not installed."""
    for module in MODULES[target.platform]:
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise ValueError(
                f"plans for {target.name} need its compiler, which is not installed here: run "
                "`make compile-check` once, then .venv-compile/bin/python scripts/plan.py"
            )


def main(argv: list[str]) -> int:
    try:
        name, target_name = check_flags(argv[1:])
        target = target_of(target_name)
        matrix = load_matrix()
        if name in matrix["presets"]:  # its model, and its config unless another is given
            FLAGS["config"].value = CONFIG.value or name
            name = matrix["presets"][name]["model"]
        model = find_model(name, matrix["models"])
        config = engine_config(model, asked(), target.platform)
        need_compiler(target)
        if target.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", target.num_devices)
        text, found, fits = run(Chip(target), model, config)
        print(text)
        if JSON.value:
            Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    except (ConfigError, MeshError, ValueError, OSError) as error:
        return refuse(str(error))
    except (MemoryError, OverflowError) as error:
        return refuse(
            f"the sizes are beyond what can be planned ({error or type(error).__name__}): a number "
            "of the model's configuration, --rows, --chunk or --set is likely wrong"
        )
    except NotImplementedError as error:  # of every backend of an operator
        return refuse(" ".join(str(error).split()))
    except jax.errors.JaxRuntimeError as error:
        return refuse(f"the compiler refused a step of the plan: {first_reason(error)}")
    return 0 if fits else 1


def check_flags(others: list[str]) -> tuple[str, str]:
    """The model and the target; `ValueError` for what can be told before anything is read."""
    if others:
        raise ValueError(f"unexpected arguments: {' '.join(others)}")
    if not MODEL.value or not TARGET.value:
        raise ValueError("--model and --target are needed, as --model=llama31_8b --target=v5e:2x2")
    if SEARCH.value and FLAGS["whole"].present:
        raise ValueError("--search compiles a few layers: leave out --whole and --nowhole")
    if FLAGS["compiled"].present and not SEARCH.value:
        raise ValueError("--compiled is for a --search: leave it out, or add that")
    mesh_sizes(MESH.value)
    quantization(QUANT.value or "none")
    if JSON.value:
        path = Path(JSON.value)
        if path.is_dir() or not path.parent.is_dir():
            what = "is a directory" if path.is_dir() else f"is in no directory ({path.parent})"
            raise ValueError(f"--json={path} {what}; it is a file to write, in one that exists")
    return MODEL.value, TARGET.value


def refuse(why: str) -> int:
    print(f"plan: {why}", file=sys.stderr)
    return 2


def parse_flags(argv: list[str]) -> list[str]:
    """As absl does, but a wrong flag is one line and exit code 2."""
    try:
        return FLAGS(argv)
    except flags.Error as error:
        sys.exit(refuse(str(error)))


def run(chip: Chip, model: Named, config: EngineConfig) -> tuple[str, Any, bool]:
    """What to print, what to write, and whether anything fits."""
    context = context_of(model, config, asked())
    if SEARCH.value:
        kinds = kinds_of(asked(), config)
        found = search(chip, model, config, kinds, context, COMPILED.value)
        fits = any(not candidate.is_refused for candidate in found)
        return search_text(chip, model, context, found), search_json(found), fits
    program = step_program(chip, model, config)
    plan = make_plan(program, context, is_whole=WHOLE.value)
    return as_text(program, context, plan), as_json(program, context, plan), plan.fits


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
