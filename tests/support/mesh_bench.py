"""Tiny models of four families, and one set of requests, to run on every mesh of eight devices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.config import from_mapping
from jaxinfer.loading.random import random_weights
from jaxinfer.loading.splitting import place_weights
from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from jaxinfer.parallel.replicas import make_engine
from jaxinfer.parallel.sharded_model import sharded_replicas
from jaxinfer.sharding.mesh import AXES

NUM_DEVICES = 8
VOCAB_SIZE = 160
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5, "num_key_value_heads": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 16} | EXPERTS,
    "deepseek_v3": EXPERTS
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
SENDS = "mixtral"  # the family that is made to dispatch rows, although its steps are small
WITH_EXPERTS = ("mixtral", "deepseek_v3")


class Calls:
    """Counts the calls of a function of a module while programs are traced."""

    def __init__(self, module: Any, name: str):
        self.count = 0
        self._function = getattr(module, name)
        setattr(module, name, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.count += 1
        return self._function(*args, **named)


def meshes(family: str) -> Iterator[dict[str, int]]:
    """Yield every mesh of eight devices; `expert` is 1 for families without experts."""
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES)):
        mesh = dict(zip(AXES, sizes, strict=True))
        product = mesh["data"] * mesh["pipe"] * mesh["seq"] * mesh["expert"] * mesh["tensor"]
        if product == NUM_DEVICES and (mesh["expert"] == 1 or family in WITH_EXPERTS):
            yield {axis: size for axis, size in mesh.items() if size > 1}


def format_mesh(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def layers_for(mesh: dict[str, int]) -> int:
    """Return the fewest layers that the stages allow, because compilation is slow."""
    return max(2, mesh.get("pipe", 1))


def model_of(family: str, num_layers: int) -> FunctionalModel:
    given = COMMON | FAMILIES[family] | {"num_hidden_layers": num_layers}
    config = {key: value for key, value in given.items() if value is not None}
    row = HF_FAMILIES[str(config["model_type"])]
    return FunctionalModel(row, row.config_from_hf(config, {}), Numerics())


def config_for(mesh: dict[str, int], **changes: Any) -> EngineConfig:
    """Make a config with one bucket and too few pages for all requests, so some are preempted."""
    keys = {
        "mesh": mesh,
        "cache": {"page_size": 8, "num_pages": 9},
        "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        "min_bucket": 16,
        "warm_up": False,
        "check_every_step": True,
    }
    return from_mapping(keys | changes)


def requests(num: int = 8) -> list[tuple[list[int], SamplingParams]]:
    """Make greedy and seeded requests whose prompts share prefixes and are longer than a step."""
    rng = random.Random(0)
    prefix = [rng.randrange(1, VOCAB_SIZE) for _ in range(24)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    ]
    found = []
    for i in range(num):
        own = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        params = {**kinds[i % 4], "max_tokens": rng.randint(4, 12), "ignore_eos": True}
        found.append((prefix[: rng.choice([0, 8, 16, 24])] + own, SamplingParams(**params)))
    return found


def run(engine: Any, work: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """Run requests as `served` does; return their tokens."""
    return [request.output_token_ids for request in served(engine, work)]


def served(engine: Any, work: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Run requests that arrive one per step; return all samples when they have finished."""
    waiting, added = list(work), []
    while waiting or engine.has_requests:
        if waiting:
            added += engine.add(*waiting.pop(0))
        engine.step()
    return added


def engine_for(model: FunctionalModel, weights: Any, config: EngineConfig) -> Any:
    models = sharded_replicas(model, config)
    return make_engine(models, place_weights(models[0], weights), config)


def weights_of(model: FunctionalModel) -> Any:
    return random_weights(model, 0)
