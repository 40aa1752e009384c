"""Measure how long a step of each family takes to trace and to compile on this CPU.

    jaxinfer bench compile [--families=qwen3,gemma2] [--layers=32] [--repeats=2]

Every family of the registry is built at one common shape (32 layers of 1,024 dimensions) with
abstract weights, and the step of one bucket is traced, lowered and compiled. Times are CPU seconds
of all threads, so that other load matters little; the best of the repeats counts. Llama runs first.
The target is a ratio to Llama below 1.5 for families of the same shape; a layer of experts or of
latent attention has more products than Llama's, and more to compile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from jaxinfer.execution import programs
from jaxinfer.execution.batch import StepShape, packed_size
from jaxinfer.execution.compile import compiler_options
from jaxinfer.execution.forward import Forward
from jaxinfer.execution.state import Program, StateSizes
from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from jaxinfer.parallel.sharded_model import ShardedModel

FLAGS = flags.FLAGS
flags.DEFINE_list("families", [], "model_type of the families to compile; none: all decoders.")
flags.DEFINE_integer("layers", 32, "Layers of each model.", lower_bound=1)
flags.DEFINE_integer("bucket", 64, "Tokens of the step.", lower_bound=1)
flags.DEFINE_integer("repeats", 2, "Compilations of each family.", lower_bound=1)

LIMIT = 1.5
PAGE_SIZE, NUM_PAGES, NUM_ROWS, MAX_LEN = 64, 128, 16, 2048
# The common shape, in the keys of most families and of those older than Llama.
SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "n_embd": 1024,
    "n_head": 16,
    "n_positions": MAX_LEN,
    "ffn_dim": 2816,
    "word_embed_proj_dim": 1024,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 704}
DEEPSEEK = MOE | {
    "num_key_value_heads": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 256,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
}
FACTORS = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
# More keys that a family needs, and features of its published models: windows, scalings, experts.
PARTICULAR: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": DEEPSEEK | {"topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v3": DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 512},
    "gemma3_text": {"head_dim": 64, "sliding_window": 512},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
    "granite": {"residual_multiplier": 0.2, "logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512},
    "mistral": {"sliding_window": 512},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 512},
    "phi3": {"rope_scaling": FACTORS, "original_max_position_embeddings": 1024},
    "qwen2_moe": MOE | {"num_experts": 8, "shared_expert_intermediate_size": 704},
    "qwen3": {"head_dim": 64},
    "qwen3_moe": MOE | {"num_experts": 8, "head_dim": 64},
}
WITHOUT_A_STEP = {"bert", "camembert", "roberta", "xlm-roberta"}  # encoders
WRAPPERS = {"gemma3", "mistral3"}  # configurations that wrap a text model of the list


def model_of(model_type: str, num_layers: int) -> FunctionalModel:
    """The family's model at the common shape; no array is made."""
    config = SHAPE | {"model_type": model_type, **PARTICULAR.get(model_type, {})}
    config |= {"num_hidden_layers": num_layers, "n_layer": num_layers}
    kinds: Any = config.get("layer_types")
    if kinds:
        config["layer_types"] = (kinds * num_layers)[:num_layers]
    family = HF_FAMILIES[model_type]
    return FunctionalModel(family, family.config_from_hf(config, {}), Numerics())


def seconds_to_compile(model: FunctionalModel, bucket: int) -> tuple[float, float]:
    """CPU seconds to trace and lower the step of `bucket` tokens, and to compile it."""
    jax.clear_caches()
    shape = StepShape.of_bucket(bucket, NUM_ROWS, PAGE_SIZE)
    weights: Any = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in model.parameters)
    packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
    sizes = StateSizes(PAGE_SIZE, NUM_ROWS, MAX_LEN, model.numerics.dtype, shape)
    program = Program(Forward(ShardedModel(model), PAGE_SIZE), weights, sizes=sizes)
    state = program.abstract_state(NUM_PAGES)
    start = time.process_time()
    lowered = programs.step.lower(weights, state, packed, program=program, shape=shape)
    middle = time.process_time()
    lowered.compile(compiler_options=compiler_options())
    return middle - start, time.process_time() - middle


def main(argv: Sequence[str]) -> None:
    """Print a line for each family."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    decoders = sorted(HF_FAMILIES.keys() - WITHOUT_A_STEP - WRAPPERS - {"llama"})
    if unknown := sorted(set(FLAGS.families) - {*decoders, "llama"}):
        raise app.UsageError(f"--families has {unknown}; known are {['llama', *decoders]}")
    chosen = [name for name in decoders if not FLAGS.families or name in FLAGS.families]
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"{'family':<14}{'trace, s':>10}{'compile, s':>12}{'both, s':>10}{'of Llama':>10}")
    llama: float | None = None
    for name in ["llama", *chosen]:
        model = model_of(name, FLAGS.layers)
        runs = [seconds_to_compile(model, FLAGS.bucket) for _ in range(FLAGS.repeats)]
        trace, compiling = min(runs, key=sum)
        both = trace + compiling
        llama = both if llama is None else llama
        ratio = both / llama
        line = f"{name:<14}{trace:>10.2f}{compiling:>12.2f}{both:>10.2f}{ratio:>10.2f}"
        print(line if ratio < LIMIT else f"{line}  above {LIMIT}", flush=True)


if __name__ == "__main__":
    app.run(main)
