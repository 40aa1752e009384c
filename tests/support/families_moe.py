"""Cases of the mixtures of experts (see `family_bench.py`)."""

from __future__ import annotations

import numpy as np

from tests.support.family_bench import FamilyCase, GgufForm, Tensors, paired

HEADS, KV_HEADS = 4, 2


def _paired(name: str, values: np.ndarray) -> Tensors:
    """Reorder q and k: Mixtral is written as llama, which rotates adjacent pairs."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    return {name: values if heads is None else paired(values, heads)}


def _shared_gate(name: str, values: np.ndarray) -> Tensors:
    """Write the matrix of one row as a vector."""
    return {name: values[0] if name.endswith("shared_expert_gate.weight") else values}


def _split(name: str, values: np.ndarray) -> Tensors:
    """Split gate and up of gpt-oss's experts, and store matrices as [outputs, inputs]."""
    if name.endswith("sinks"):
        return {f"{name}.weight": values}
    if ".experts." not in name:
        return {name: values}
    turned = values if name.endswith("bias") else values.swapaxes(1, 2)
    kind = "bias" if name.endswith("bias") else "weight"
    name = name.removesuffix("_bias")
    if name.endswith("down_proj"):
        return {f"{name}.{kind}": turned}
    axis = np.s_[:, 0::2], np.s_[:, 1::2]
    names = [name.replace("gate_up_proj", f"{part}_proj.{kind}") for part in ("gate", "up")]
    return {part: turned[cut] for part, cut in zip(names, axis, strict=True)}


GGUF_COMMON = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "expert_count": 6,
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 9,
}
CASES: dict[str, FamilyCase] = {
    "mixtral": FamilyCase(
        MIXTRAL,
        gguf=GgufForm(
            "llama",
            GGUF_COMMON
            | {
                "expert_used_count": 2,
                "rope.dimension_count": 8,
                "rope.freq_base": 1_000_000.0,
                "attention.layer_norm_rms_epsilon": 1e-5,
            },
            _paired,
        ),
    ),
    "mixtral_window": FamilyCase(
        MIXTRAL
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "head_dim": 16,
            "rope_theta": 500.0,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": FamilyCase(
        QWEN2,
        gguf=GgufForm(
            "qwen2moe",
            GGUF_COMMON
            | {
                "expert_used_count": 3,
                "expert_feed_forward_length": 24,
                "expert_shared_feed_forward_length": 40,
                "rope.freq_base": 10_000.0,
                "attention.layer_norm_rms_epsilon": 1e-6,
            },
            _shared_gate,
        ),
    ),
    # Experts only in layer 1 (layer 3 is in mlp_only_layers), windows in layers 0 and 2.
    "qwen2_moe_sparse": FamilyCase(
        QWEN2
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe": FamilyCase(
        QWEN3 | {"norm_topk_prob": True},
        gguf=GgufForm(
            "qwen3moe",
            GGUF_COMMON
            | {
                "expert_used_count": 3,
                "expert_feed_forward_length": 24,
                "attention.key_length": 16,
                "attention.value_length": 16,
                "rope.freq_base": 10_000.0,
                "attention.layer_norm_rms_epsilon": 1e-6,
            },
        ),
    ),
    "qwen3_moe_first_dense": FamilyCase(
        QWEN3
        | {
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
        },
    ),
    "gpt_oss": FamilyCase(
        GPT_OSS
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        gguf=GgufForm(
            "gpt-oss",
            GGUF_COMMON
            | {
                "expert_used_count": 2,
                "expert_feed_forward_length": 48,
                "attention.key_length": 16,
                "attention.value_length": 16,
                "attention.sliding_window": 9,
                "rope.freq_base": 150_000.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "attention.layer_norm_rms_epsilon": 1e-5,
            },
            _split,
        ),
    ),
    # A gate that is often clamped, other layer types, and the older RoPE keys.
    "gpt_oss_clamped": FamilyCase(
        GPT_OSS
        | {
            "num_hidden_layers": 3,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.7,
            "swiglu_alpha": 1.3,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_theta": 5000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "truncate": True,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
