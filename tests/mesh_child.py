"""Run by tests/test_meshes.py in a process with eight CPU devices: tokens on meshes, as JSON.

python tests/mesh_child.py FAMILY MESH...      a mesh as tensor=4,pipe=2
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import mesh_bench


def parsed(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(",") if part)
    return {axis: int(size) for axis, size in pairs}


def main(family: str, texts: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", mesh_bench.NUM_DEVICES)
    model = mesh_bench.model_of(family)
    weights = mesh_bench.weights_of(model)
    work = mesh_bench.requests()
    found: dict[str, Any] = {}
    for text in ["", *texts]:
        start = time.perf_counter()
        engine = mesh_bench.engine_for(model, weights, mesh_bench.config_for(parsed(text)))
        found[text] = {
            "tokens": mesh_bench.run(engine, work),
            "preemptions": engine.stats.num_preemptions,
            "shared": engine.stats.num_shared,
        }
        is_equal = found[text]["tokens"] == found[""]["tokens"]
        seconds = time.perf_counter() - start
        print(f"{family} {text or 'one device'}: {is_equal}, {seconds:.1f} s", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
