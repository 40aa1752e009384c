"""Run by tests/parallel/test_replicas.py in a process with four CPU devices: prints its findings
as JSON.

python tests/support/replicas_child.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 4)

from jaxinfer import LLM, SamplingParams  # noqa: E402
from jaxinfer.config import from_mapping  # noqa: E402
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint  # noqa: E402  (no device touched before)

MODEL = TinyLlama(num_layers=1)
OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "warm_up": False,
    "min_bucket": 16,  # two programs an engine: compiling is what takes the time
    "seed": 3,
    "check_every_step": True,
    "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "cache": {"page_size": 8, "num_pages": 24},
}
MESHES = {"alone": {}, "data 4": {"data": 4}, "data 2, tensor 2": {"data": 2, "tensor": 2}}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, seeded and neither; prompts that share prefixes; some of two samples."""
    rng = random.Random(0)
    stem = [rng.randrange(1, 200) for _ in range(16)]
    kinds = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.1})
    found = []
    for i in range(12):
        prompt = stem[: rng.choice([0, 8, 16])] + [rng.randrange(1, 200) for _ in range(5)]
        sampling = {**kinds[i % 3], "n": 1 + (i % 4 == 0), "max_tokens": rng.randint(3, 9)}
        found.append((prompt, SamplingParams(ignore_eos=True, **sampling)))
    return found


def findings(folder: Path) -> dict[str, Any]:
    checkpoint = write_checkpoint(MODEL, folder / "tiny")
    found: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        llm = LLM(checkpoint, from_mapping({**OPTIONS, "mesh": mesh}), show_progress=False)
        prompts, params = zip(*requests(), strict=True)
        outputs = [llm.generate(prompts, params) for _ in range(2)]  # with cached prefixes too
        engines = llm.engine.replicas
        arrays: list[Any] = [engine.weights[0] for engine in engines]
        found[name] = {
            "tokens": [[c.token_ids for c in o.outputs] for once in outputs for o in once],
            "texts": [[c.text for c in o.outputs] for once in outputs for o in once],
            "devices": [sorted(d.id for d in array.devices()) for array in arrays],
            "generated": [e.stats.num_generated for e in engines],
            "shared": llm.engine.stats.num_shared,
            "owned": llm.engine.stats.num_owned_pages,
            "loads": getattr(llm.engine, "loads", [0]),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(findings(Path(sys.argv[1]))))
