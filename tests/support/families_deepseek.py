"""Cases of DeepSeek-V2 and V3 (see `family_bench.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.family_bench import FamilyCase, GgufForm, Tensors

NOPE_DIM, VALUE_DIM = 8, 12
COMMON: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": NOPE_DIM,
    "qk_rope_head_dim": 8,
    "v_head_dim": VALUE_DIM,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def _yarn(mscale: float, all_dim: float, **others: Any) -> dict[str, Any]:
    return {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
        **others,
    }


GGUF: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "vocab_size": 160,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.kv_lora_rank": 16,
    "rope.dimension_count": 8,
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 16,
}
# The older format (V2-Lite): a head's lengths, and one tensor for keys and values.
GGUF_LITE = GGUF | {
    "attention.head_count_kv": 4,
    "attention.key_length": NOPE_DIM + 8,
    "attention.value_length": VALUE_DIM,
    "rope.scaling.yarn_log_multiplier": 0.0707,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.0,
}
# The format since the absorbed form (V3): the cache has one head.
GGUF_V3 = GGUF | {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 24,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": NOPE_DIM + 8,
    "attention.value_length_mla": VALUE_DIM,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}


def _v3_gguf(name: str, values: np.ndarray) -> Tensors:
    if name.endswith("kv_b_proj.weight"):
        by_head = values.reshape(4, NOPE_DIM + VALUE_DIM, -1)
        return {
            name.replace("kv_b_proj", "k_b_proj"): by_head[:, :NOPE_DIM].swapaxes(1, 2),
            name.replace("kv_b_proj", "v_b_proj"): by_head[:, NOPE_DIM:],
        }
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): values}


CASES: dict[str, FamilyCase] = {
    "deepseek_v2_lite": FamilyCase(
        COMMON
        | {
            "model_type": "deepseek_v2",
            "rope_theta": 10000,
            "rope_scaling": _yarn(0.707, 0.707, type="yarn"),
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_layer_freq": 1,
        },
        GgufForm("deepseek2", GGUF_LITE),
        nulls=("q_lora_rank",),
    ),
    "deepseek_v2_groups_and_biases": FamilyCase(
        COMMON
        | {
            "model_type": "deepseek_v2",
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
            "num_hidden_layers": 3,
        },
        seed=1,
    ),
    "deepseek_v3": FamilyCase(
        COMMON
        | {
            "model_type": "deepseek_v3",
            "q_lora_rank": 24,
            "rope_theta": 10000,
            "rope_scaling": _yarn(1.0, 1.0, type="yarn"),
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        GgufForm("deepseek2", GGUF_V3, _v3_gguf),
        seed=2,
    ),
    "deepseek_v3_halves_unnormed": FamilyCase(
        COMMON
        | {
            "model_type": "deepseek_v3",
            "rope_interleave": False,
            "rope_parameters": _yarn(1.0, 0.4, rope_type="yarn", rope_theta=5000.0),
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
        seed=3,
        nulls=("q_lora_rank",),
    ),
}
