"""The engine without a server, for `jaxinfer bench serve`: it reads commands and answers with
times.

Started by `serve_cases.server.Reference`: one JSON object a line on stdin and on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from jaxinfer import LLM, SamplingParams, load_config
from jaxinfer.execution.host_tuning import tune_gc

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "demo", "The model to load.")
flags.DEFINE_string("config", None, "Preset or .toml file of engine options.")
flags.DEFINE_multi_string("set", [], "Engine options, key.path=value.")


def generate(llm: LLM, prompts: list[str | list[int]], max_tokens: list[int]) -> float:
    """Time the greedy generation of all prompts together, each to its full length."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == max_tokens
    return seconds


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Time the first token of one prompt; the engine is idle afterwards."""
    engine = llm.engine
    start = time.perf_counter()
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    while not any(update.token_ids for update in engine.step()):
        pass
    seconds = time.perf_counter() - start
    while engine.has_requests:
        engine.step()
    return seconds


def answer(llm: LLM, command: dict[str, Any]) -> float:
    """Run a command and return its seconds."""
    if "prompts" in command:
        return generate(llm, command["prompts"], command["max_tokens"])
    return first_token(llm, command["prompt"])


def main(argv: Sequence[str]) -> None:
    """Load the model, report it, and answer commands until stdin ends."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown: {argv[1:]}")
    settings = [text for text in FLAGS.set if not text.startswith("serving.")]
    llm = LLM(FLAGS.model, load_config(FLAGS.config, settings), show_progress=False)
    tune_gc()  # as the server does
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": answer(llm, json.loads(line))}), flush=True)


if __name__ == "__main__":
    app.run(main)
