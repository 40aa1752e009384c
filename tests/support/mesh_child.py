"""Generate tokens on meshes of eight CPU devices and print them as JSON.

    python tests/support/mesh_child.py FAMILY MESH...

A mesh has the form tensor=4,pipe=2. Used by tests/parallel/test_meshes.py.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax

from jaxinfer.nn import experts
from jaxinfer.sharding import ring, zigzag
from tests.support import mesh_bench


def parsed(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(",") if part)
    return {axis: int(size) for axis, size in pairs}


def main(family: str, texts: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", mesh_bench.NUM_DEVICES)
    zigzag.MAX_UNSPLIT_TOKENS = 4  # so that steps of 16 tokens use ring attention
    if family == mesh_bench.SENDS:
        experts.should_dispatch = lambda T, k, e, t, row_bytes: e > 1
    work, passes = mesh_bench.requests(), mesh_bench.Calls(ring, "shift")
    alone: dict[int, Any] = {}
    found = {}
    for mesh in map(parsed, texts):
        num_layers = mesh_bench.layers_for(mesh)
        model = mesh_bench.model_of(family, num_layers)
        weights = mesh_bench.weights_of(model)

        def outcome(mesh: dict[str, int], model=model, weights=weights) -> dict[str, Any]:
            engine = mesh_bench.engine_for(model, weights, mesh_bench.config_for(mesh))
            passed_before = passes.count
            tokens = mesh_bench.run(engine, work)
            stats = engine.stats
            return {
                "tokens": tokens,
                "preemptions": stats.num_preemptions,
                "shared": stats.num_shared,
                "passes": passes.count - passed_before,
            }

        start = time.perf_counter()
        if num_layers not in alone:
            alone[num_layers] = outcome({})
        run = outcome(mesh)
        text = mesh_bench.format_mesh(mesh)
        found[text] = {"alone": alone[num_layers], "mesh": run}
        is_equal = run["tokens"] == alone[num_layers]["tokens"]
        seconds = time.perf_counter() - start
        print(f"{family} {text}: {is_equal}, {seconds:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
