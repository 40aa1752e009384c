"""Run the same requests with each engine feature on a mesh of four CPU devices and on one device.

The results are printed as JSON for tests/parallel/test_mesh_features.py.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxinfer import SamplingParams
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.nn.quantized import Quantized
from jaxinfer.sharding import products, ring, zigzag
from tests.support import mesh_bench
from tests.support.quantized_bench import quantize_weights

NUM_DEVICES = 4
NUM_LAYERS = 1


class Feature(NamedTuple):
    """Options of an engine; the engine on one device has all of them except `mesh`."""

    mesh: dict[str, Any]
    options: Mapping[str, Any] = MappingProxyType({})
    family: str = "llama"


FEATURES = {  # some are combined, because compiling each engine takes a few seconds
    "split heads": Feature({"tensor": 4}),
    "split sequences": Feature({"seq": 4}),
    "overlap, whole vocabulary": Feature({"tensor": 4, "overlap": True, "whole": ["vocab"]}),
    "int8": Feature({"tensor": 4}, {"quantize": "int8"}),
    "int4": Feature({"tensor": 4}, {"quantize": "int4"}),
    "int8_w8a8": Feature({"tensor": 4}, {"quantize": "int8_w8a8"}),
    "float8, int8 cache": Feature(
        {"seq": 2, "tensor": 2}, {"quantize": "float8", "cache": {"dtype": "int8"}}
    ),
    "batch_invariant": Feature({"expert": 2, "tensor": 2}, {"batch_invariant": True}, "mixtral"),
}


@functools.cache
def model_of(family: str) -> tuple[FunctionalModel, Weights]:
    model = mesh_bench.model_of(family, NUM_LAYERS)
    return model, mesh_bench.weights_of(model)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Make requests that use every sampling feature with state that the mesh shards."""
    prompts: list[tuple[list[int], dict[str, Any]]] = [
        (list(range(1, 30)), {"temperature": 0, "logprobs": 3}),
        ([*range(1, 29), 70], {"temperature": 0, "prompt_logprobs": 2}),
        ([5, 5, 5], {"frequency_penalty": 1.5, "presence_penalty": 0.5, "n": 2, "logprobs": 0}),
        (list(range(40, 60)), {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {5: 2}}),
        ([9, 8, 7], {"min_p": 0.05, "allowed_token_ids": list(range(20, 120)), "logprobs": 1}),
        ([3] * 17, {"temperature": 0.9, "top_k": 70, "top_p": 0.99}),
    ]
    return [
        (prompt, SamplingParams(max_tokens=6, seed=1, ignore_eos=True, **params))
        for prompt, params in prompts
    ]


def run(engine: Any, work: list[tuple[list[int], SamplingParams]]) -> dict[str, Any]:
    """Return the tokens and, in order of position, pairs of a token and its logprob."""
    added, logprobs = mesh_bench.served(engine, work), []
    for request in added:
        entries = [
            *request.logprobs.output,
            *(request.logprobs.prompt[i] for i in request.logprobs.prompt),
        ]
        for entry in entries:
            logprobs += [(entry.token_id, entry.logprob), *entry.top]
    return {"tokens": [request.output_token_ids for request in added], "logprobs": logprobs}


def outcome(
    feature: Feature, mesh: dict[str, Any], calls: dict[str, mesh_bench.Calls]
) -> dict[str, Any]:
    """Run all requests, then the first one alone; also report which features were used."""
    cache = {"page_size": 8, "num_pages": 24} | feature.options.get("cache", {})
    config = mesh_bench.config_for(mesh, **{**feature.options, "cache": cache})
    model, weights = model_of(feature.family)
    model = FunctionalModel(model.family, model.config, numerics_for(config))
    if config.quantize is not None:
        weights = quantize_weights(model, weights, config.quantize)
    engine = mesh_bench.engine_for(model, weights, config)
    before = {name: counted.count for name, counted in calls.items()}
    together = run(engine, requests())
    engine.clear_prefix_cache()
    parameters = zip(engine.runner.model.parameters, engine.weights, strict=True)
    [table] = [weight for spec, weight in parameters if spec.packs == "table"]
    return {
        "together": together,
        "alone": run(engine, requests()[:1]),
        "cache": engine.runner.state.pages[0].k.dtype.name,
        "rows_of_table": table.addressable_shards[0].data.shape[0],
        "num_quantized": sum(isinstance(weight, Quantized) for weight in engine.weights),
        "calls": {name: counted.count - before[name] for name, counted in calls.items()},
    }


def main() -> None:
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    zigzag.MAX_UNSPLIT_TOKENS = 4  # so that steps of 16 tokens use ring attention
    calls = {
        "shift": mesh_bench.Calls(ring, "shift"),
        "overlapped_product": mesh_bench.Calls(products, "overlapped_product"),
    }
    found: dict[str, Any] = {}
    one_device: dict[str, Any] = {}
    for name, feature in FEATURES.items():
        start = time.perf_counter()
        same = repr((feature.family, dict(feature.options)))
        if same not in one_device:
            one_device[same] = outcome(feature, {}, calls)
        found[name] = {"one": one_device[same], "mesh": outcome(feature, feature.mesh, calls)}
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
