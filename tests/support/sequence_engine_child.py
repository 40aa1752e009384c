"""Compare an engine that splits sequences over eight CPU devices with one on a single device.

The engines run a prompt that needs the memory of eight devices, then a mixed batch with preemptions
and a shared prefix. Used by tests/parallel/test_sequence_engine.py, which reads the printed JSON.
"""

from __future__ import annotations

import json
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402

from jaxinfer import InvalidRequestError, SamplingParams  # noqa: E402
from jaxinfer.sharding import zigzag  # noqa: E402
from tests.support import running  # noqa: E402

zigzag.MAX_UNSPLIT_TOKENS = 8  # steps of more tokens use ring attention
NUM_PAGES = 16  # pages of 8 tokens, over eight devices
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(3, 90, 8 * NUM_PAGES - 12).tolist()
PREFIX = RNG.integers(3, 90, 17).tolist()
MIXED = [PREFIX + RNG.integers(3, 90, n).tolist() for n in (1, 20, 40, 9)] + [[5, 6, 7]]


def engine(options: dict[str, Any]) -> Any:
    model, weights = running.tiny("mha")
    return running.engine(
        model, weights, {"max_model_len": 128, "cache": {"num_pages": None}} | options
    )


def outputs(engine: Any) -> dict[str, Any]:
    """Run the long prompt alone, then the mixed batch; return the tokens of all requests."""
    params = lambda i, **more: SamplingParams(
        temperature=0.8 * (i % 2), seed=i, max_tokens=10, ignore_eos=True, **more
    )
    [long] = engine.add(PROMPT, params(1, prompt_logprobs=1))
    running.run(engine)
    requests = [long]
    for i, prompt in enumerate(MIXED):
        requests += engine.add(prompt, params(i))
        if i > 1:  # while the others run
            engine.step()
    running.run(engine)
    return {
        "tokens": running.tokens_of(requests),
        "logprobs": [entry.logprob for entry in long.logprobs.prompt.values()],
        "preemptions": engine.scheduler.num_preemptions,
        "shared": engine.scheduler.num_shared_tokens,
    }


def findings() -> dict[str, Any]:
    whole = engine({"cache": {"num_pages": NUM_PAGES, "page_size": 8}})
    memory = whole.runner.memory.cache_bytes // 8
    small = {"memory_bytes": memory, "page_size": 8, "num_pages": None}
    found: dict[str, Any] = {"one": outputs(whole)}
    try:
        engine({"cache": small}).add(PROMPT, SamplingParams(max_tokens=10))
        found["refused"] = ""
    except InvalidRequestError as error:
        found["refused"] = str(error)
    split = engine({"cache": small, "mesh": {"seq": 8}})
    pages = jax.tree.leaves(split.runner.state.pages)
    found["bytes"] = [sum(p.addressable_shards[0].data.nbytes for p in pages), memory]
    found["eight"] = outputs(split)
    return found


if __name__ == "__main__":
    print(json.dumps(findings()))
