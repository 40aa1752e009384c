"""Plan a model on a target: whether it fits, with how much cache, and its speed at best.

    jaxinfer plan --model=llama31_70b --target=v5e:4x4 --mesh=tensor=16 --context=8192
    jaxinfer plan --model=PATH --target=h100:8 --search

The step of the engine is compiled for the target by its real compiler, on a CPU and without a
device, in the environment that `make compile-check` makes (.venv-compile). `--target=cpu:8` needs
no such compiler, to try the planner. The plan tells the bytes on a device, the collectives of a
step, the tokens of cache, and the roofline of a decode step and of a prefill chunk
(`tools/planner/roofline.py` has the formula, `tools/targets/` the chips). stderr tells what is
being compiled. Exit code 0: the model fits. Exit code 1: it does not; of a search, nothing does.
Exit code 2: nothing could be planned, because of wrong options, a missing model, or a missing
compiler.

`--search` tries the meshes that divide the model and the quantizations by arithmetic, and compiles
the cheapest few. Where `--quant`, the option `quantize`, the preset or the checkpoint sets a
quantization, only that one is tried.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from absl import flags

from jaxinfer.tools.compile_gate.matrix import ChipTarget, load_matrix, target_names
from jaxinfer.tools.compile_gate.run import ENVIRONMENT

# Before a compiler is loaded, which reads them.
os.environ.update({name: value for name, value in ENVIRONMENT.items() if value is not None})
os.environ.pop("TRITON_INTERPRET", None)

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.loading.quantize import RECIPES
from jaxinfer.options import ConfigError
from jaxinfer.sharding.mesh import MeshError
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.compile_gate.text import first_reason
from jaxinfer.tools.planner.models import NamedModel, find_model
from jaxinfer.tools.planner.options import (
    PlanRequest,
    engine_config,
    parse_mesh,
    parse_quantization,
    parse_target,
    plan_context,
    searched_quantizations,
)
from jaxinfer.tools.planner.plans import make_plan, step_program
from jaxinfer.tools.planner.report import as_json, as_text, search_json, search_text
from jaxinfer.tools.planner.search import search

FLAGS = flags.FLAGS
MODEL = flags.DEFINE_string(
    "model",
    None,
    "a name of [models] in compile_gate/matrix.toml, a preset, a directory, a config.json, a .gguf "
    "file, a hub id, or demo",
)
TARGET = flags.DEFINE_string(
    "target", None, f"chip and topology, as v5e:4x4 or h100:8; chips: {', '.join(target_names())}"
)
MESH = flags.DEFINE_string("mesh", "", "sizes of the mesh's axes, as pipe=2,tensor=8")
QUANT = flags.DEFINE_string("quant", None, f"quantization of weights: none, {', '.join(RECIPES)}")
CONTEXT = flags.DEFINE_integer(
    "context",
    None,
    "tokens of a request, prompt and output; by default the model's limit, 8192 at most",
)
ROWS = flags.DEFINE_integer("rows", None, "the most requests at once; 64 without a preset")
CHUNK = flags.DEFINE_integer("chunk", None, "the most tokens of a step; 1024 without a preset")
CONFIG = flags.DEFINE_string("config", None, "a preset's name or a .toml file")
SET = flags.DEFINE_multi_string("set", [], "engine option, key.path=value; may be repeated")
WHOLE = flags.DEFINE_boolean("whole", True, "compile all layers; otherwise a few, and extrapolate")
SEARCH = flags.DEFINE_boolean("search", False, "try meshes and, where none is set, quantizations")
COMPILED = flags.DEFINE_integer(
    "compiled", 3, "in a search: compile until this many fit", lower_bound=1
)
JSON = flags.DEFINE_string("json", None, "also write all findings to this file")

HELP = {
    "Model": ("model", "config", "set", "quant"),
    "Target": ("target", "mesh", "search", "compiled"),
    "Load": ("context", "rows", "chunk"),
    "Output": ("whole", "json"),
}

MODULES = {"tpu": ("libtpu",), "gpu": ("jax_plugins.xla_cuda12",), "cpu": ()}


def asked() -> PlanRequest:
    """Return what the flags ask for."""
    return PlanRequest(
        CONFIG.value,
        MESH.value,
        QUANT.value,
        CONTEXT.value,
        ROWS.value,
        CHUNK.value,
        SET.value,
        SEARCH.value,
    )


def need_compiler(target: ChipTarget) -> None:
    """Raise `ValueError`, with what to do, where the target's compiler is not installed."""
    for module in MODULES[target.platform]:
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise ValueError(
                f"plans for {target.name} need its compiler, and {module} is not installed: in a "
                "clone run `make compile-check` once, then .venv-compile/bin/jaxinfer plan"
            )


def main(argv: list[str]) -> int:
    """Plan what the flags ask for, print the plan, and return an exit code."""
    jax.config.update("jax_platforms", "cpu")  # no device is looked for
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        name, target_name = check_flags(argv[1:])
        target = parse_target(target_name)
        matrix = load_matrix()
        if name in matrix["presets"]:  # the preset's model, and its config unless another is given
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
    except NotImplementedError as error:  # every backend of an operator declined
        return refuse(" ".join(str(error).split()))
    except jax.errors.JaxRuntimeError as error:
        return refuse(f"the compiler refused a step of the plan: {first_reason(error)}")
    return 0 if fits else 1


def check_flags(others: list[str]) -> tuple[str, str]:
    """Return the model and the target; `ValueError` for flags that are wrong by themselves."""
    if others:
        raise ValueError(f"unexpected arguments: {' '.join(others)}")
    if not MODEL.value or not TARGET.value:
        raise ValueError("--model and --target are needed, as --model=llama31_8b --target=v5e:2x2")
    if SEARCH.value and FLAGS["whole"].present:
        raise ValueError("--search compiles a few layers: leave out --whole and --nowhole")
    if FLAGS["compiled"].present and not SEARCH.value:
        raise ValueError("--compiled is for a --search: leave it out, or add that")
    parse_mesh(MESH.value)
    parse_quantization(QUANT.value or "none")
    if JSON.value:
        path = Path(JSON.value)
        if path.is_dir() or not path.parent.is_dir():
            what = "is a directory" if path.is_dir() else f"is in no directory ({path.parent})"
            raise ValueError(f"--json={path} {what}; it is a file to write, in one that exists")
    return MODEL.value, TARGET.value


def refuse(why: str) -> int:
    """Say on stderr why nothing was planned, and return the exit code for that."""
    print(f"error: {why}", file=sys.stderr)
    return 2


def run(chip: Chip, model: NamedModel, config: EngineConfig) -> tuple[str, Any, bool]:
    """Return the text to print, the JSON to write, and whether anything fits."""
    context = plan_context(model, config, asked())
    if SEARCH.value:
        kinds = searched_quantizations(asked(), config)
        found = search(chip, model, config, kinds, context, COMPILED.value)
        fits = any(not candidate.is_refused for candidate in found)
        return search_text(chip, model, context, found), search_json(found), fits
    program = step_program(chip, model, config)
    plan = make_plan(program, context, is_whole=WHOLE.value)
    return as_text(program, context, plan), as_json(program, context, plan), plan.fits
