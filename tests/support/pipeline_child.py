"""Run a pipeline of four stages on four CPU devices; print the results as JSON.

Used by tests/parallel/test_pipeline.py: `python tests/support/pipeline_child.py`.
"""

from __future__ import annotations

import json
from typing import Any

import jax

from jaxinfer import SamplingParams
from jaxinfer.engine.engine import Engine
from tests.support import mesh_bench
from tests.support.mesh_bench import config_for, run

STAGES = 4
CHUNK = 16


def engine_of(model: Any, weights: Any, **changes: Any) -> Engine:
    return Engine(model, weights, config_for({"pipe": STAGES}, **changes))


def numbered_ticks(engine: Engine) -> list[list[int | None]]:
    """Return, for each tick until all requests are done, the micro-batch number at each stage."""
    numbers: dict[int, int] = {}
    kept, trace = [], []  # plans are kept so that their ids are not reused
    dispatch = engine.runner.dispatch

    def watched(plan):
        result = dispatch(plan)
        kept.append(plan)
        for stage in engine.runner.stages:
            if stage is not None:
                numbers.setdefault(id(stage), len(numbers))
        trace.append([None if s is None else numbers[id(s)] for s in engine.runner.stages])
        return result

    engine.runner.dispatch = watched
    while engine.has_requests:
        engine.step()
    del engine.runner.dispatch
    return trace


def ticks_of_16_chunks(model, weights) -> list[list[int | None]]:
    cache = {"page_size": 8, "num_pages": 64, "prefix_cache": False}
    engine = engine_of(model, weights, cache=cache, max_model_len=300)
    engine.add(
        [1 + i % 100 for i in range(16 * CHUNK)], SamplingParams(temperature=0, max_tokens=1)
    )
    return numbered_ticks(engine)


def ticks_of_decodes(model, weights) -> list[list[int | None]]:
    cache = {"page_size": 8, "num_pages": 64}
    scheduler = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    engine = engine_of(model, weights, cache=cache, scheduler=scheduler)
    for i in range(8):
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        engine.add([1 + i, 2, 3], params)
    return numbered_ticks(engine)


def with_everything() -> list[tuple[list[int], SamplingParams]]:
    """Make requests with logprobs, penalties and min_tokens."""
    common = {"max_tokens": 8, "ignore_eos": True}
    return [
        (list(range(1, 30)), SamplingParams(temperature=0, logprobs=2, **common)),
        ([7, 8, 9, 10], SamplingParams(temperature=0, prompt_logprobs=1, **common)),
        ([5, 5, 5], SamplingParams(temperature=0.7, seed=1, frequency_penalty=1.5, **common)),
        (list(range(40, 60)), SamplingParams(temperature=0, min_tokens=3, **common)),
    ]


def reports(engine: Engine) -> Any:
    added = [engine.add(*request)[0] for request in with_everything()]
    while engine.has_requests:
        engine.step()
    return [
        [
            request.output_token_ids,
            [round(entry.logprob, 4) for entry in request.logprobs.output],
            {k: round(v.logprob, 4) for k, v in sorted(request.logprobs.prompt.items())},
        ]
        for request in added
    ]


def after_aborts(engine: Engine) -> Any:
    """Abort requests in flight whose slots other requests with penalties then take."""
    for i in range(3):
        [gone] = engine.add([9 + i] * 12, SamplingParams(max_tokens=20, frequency_penalty=1.0))
        for _ in range(3 + i):
            engine.step()
        engine.abort(gone.id)
    return reports(engine)


def after_a_failure(engine: Engine) -> Any:
    added = [engine.add(*request)[0] for request in with_everything()]
    for _ in range(6):
        engine.step()
    dispatch = engine.runner.dispatch

    def failing(plan):
        raise KeyboardInterrupt

    engine.runner.dispatch = failing
    try:
        while True:
            engine.step()
    except KeyboardInterrupt:
        engine.runner.dispatch = dispatch
    while engine.has_requests:
        engine.step()
    return [request.output_token_ids for request in added]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", STAGES)
    model = mesh_bench.model_of("llama", STAGES)
    weights = mesh_bench.weights_of(model)
    alone = Engine(model, weights, config_for({}))
    piped = engine_of(model, weights)
    expected = reports(alone)
    found = {
        "chunks": ticks_of_16_chunks(model, weights),
        "decodes": ticks_of_decodes(model, weights),
        "reports": [expected, reports(piped)],
        "aborts": [expected, after_aborts(piped)],
        "failure": [[r[0] for r in expected], after_a_failure(piped)],
        "tokens": [
            run(engine, mesh_bench.requests())
            for engine in (alone, engine_of(model, weights, overlap=False))
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
