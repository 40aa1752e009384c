"""Cases of the dense Llama-like families (see `family_bench.py`).

Windows and LongRoPE's original length are far below the sequences' lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.family_bench import VOCAB_SIZE, FamilyCase, GgufForm, Tensors, paired

FULL, SLIDING = "full_attention", "sliding_attention"
# What llama.cpp's converter writes for `family_bench.COMMON`.
METADATA = {
    "vocab_size": VOCAB_SIZE,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
    "rope.dimension_count": 8,
}
HEADS_OF_16 = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# LongRoPE's divisors for 12 and 16 rotated dimensions of a head.
SHORT_6, LONG_6 = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5], [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SHORT_8, LONG_8 = [1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2.0], [1.0, 1.5, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Below, at and above the 32 positions at which LongRoPE changes its divisors.
AROUND_32 = (20, 50, 32, 33)


def _pair_heads(name: str, values: np.ndarray) -> Tensors:
    """Return the rows in the order of architectures that rotate adjacent pairs."""
    for part, num_heads in (("q_proj", 4), ("k_proj", 2)):
        if part in name:
            return {name: paired(values, num_heads)}
    return {name: values}


def _add_one_to_norms(name: str, values: np.ndarray) -> Tensors:
    return {name: values + 1 if name.endswith("norm.weight") else values}


def _with_factors(short: list[float], long: list[float]) -> Callable[[str, np.ndarray], Tensors]:
    """Add LongRoPE's two tensors of factors, which a Hugging Face file has in its config."""
    factors = {
        "rope_factors_long.weight": np.asarray(long, np.float32),
        "rope_factors_short.weight": np.asarray(short, np.float32),
    }
    return lambda name, values: {name: values} | (factors if name == "model.norm.weight" else {})


def _with_divisors(name: str, values: np.ndarray) -> Tensors:
    """Add `LLAMA3` as the converter writes it: a tensor of each frequency's divisor."""
    tensors = _pair_heads(name, values)
    if name == "model.norm.weight":
        turns = LLAMA3["original_max_position_embeddings"] / (
            2 * np.pi * 100.0 ** (np.arange(4) / 4)
        )
        low, high, factor = (LLAMA3[f"{key}factor"] for key in ("low_freq_", "high_freq_", ""))
        kept = np.clip((turns - low) / (high - low), 0, 1)
        divisors = 1 / ((1 - kept) / factor + kept)
        tensors["rope_freqs.weight"] = divisors.astype(np.float32)
    return tensors


def _images(kind: str, **more: Any) -> dict[str, Any]:
    """Return the smallest vision tower, for models of which only the text is run."""
    return {
        "model_type": kind,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        **more,
    }


LLAMA_CASES = {
    "llama": FamilyCase(
        {
            "model_type": "llama",
            "rope_theta": 100.0,
            "rope_scaling": LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
        },
        GgufForm("llama", METADATA | {"rope.freq_base": 100.0}, _with_divisors),
    ),
}
MISTRAL_CASES = {
    "mistral": FamilyCase({"model_type": "mistral", "sliding_window": 9}),
    "ministral": FamilyCase(
        {
            "model_type": "ministral",
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }
    ),
}
QWEN_CASES = {
    "qwen2": FamilyCase(
        {
            "model_type": "qwen2",
            "rope_theta": 1000.0,
            "rope_scaling": YARN,
            "sliding_window": 9,
            "use_sliding_window": False,
        },
        GgufForm(
            "qwen2",
            METADATA
            | {
                "rope.freq_base": 1000.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
        ),
    ),
    "qwen2_windows_tied": FamilyCase(
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        }
    ),
    "qwen3": FamilyCase(
        {"model_type": "qwen3", "head_dim": 16},
        GgufForm("qwen3", METADATA | HEADS_OF_16),
    ),
    "qwen3_biases_windows": FamilyCase(
        {
            "model_type": "qwen3",
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL],
        }
    ),
}
SMOLLM_CASES = {
    "smollm3": FamilyCase(
        {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": None},
        GgufForm(
            "smollm3", METADATA | {"block_count": 4, "rope.freq_base": 2_000_000.0}, _pair_heads
        ),
    ),
    "smollm3_windows_biases": FamilyCase(
        {
            "model_type": "smollm3",
            "rope_theta": 1000.0,
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "mlp_bias": True,
        }
    ),
}
GEMMA = {"tie_word_embeddings": None, "head_dim": 16}
_GEMMA_CASES = {
    "gemma": FamilyCase(
        GEMMA | {"model_type": "gemma", "hidden_act": "gelu", "num_key_value_heads": 1},
        GgufForm(
            "gemma", METADATA | HEADS_OF_16 | {"attention.head_count_kv": 1}, _add_one_to_norms
        ),
    ),
    "gemma2": FamilyCase(
        GEMMA
        | {
            "model_type": "gemma2",
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
        GgufForm(
            "gemma2",
            METADATA
            | HEADS_OF_16
            | {
                "attention.sliding_window": 9,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 8.0,
            },
            _add_one_to_norms,
        ),
    ),
    "gemma2_no_caps": FamilyCase(
        GEMMA
        | {
            "model_type": "gemma2",
            "sliding_window": 9,
            "layer_types": [FULL, SLIDING],
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        }
    ),
    "gemma3_text": FamilyCase(
        GEMMA
        | {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window": 9,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 8.0,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        GgufForm(
            "gemma3",
            METADATA
            | HEADS_OF_16
            | {
                "block_count": 6,
                "attention.sliding_window": 9,
                "final_logit_softcapping": 8.0,
                "rope.freq_base": 5000.0,
                "rope.freq_base_swa": 100.0,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
            _add_one_to_norms,
        ),
    ),
    "gemma3": FamilyCase(
        {
            "model_type": "gemma3",
            "tie_word_embeddings": None,
            "mm_tokens_per_image": 4,
            "vision_config": _images("siglip_vision_model"),
            "text_config": {
                "model_type": "gemma3_text",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "sliding_window": 9,
                "layer_types": [SLIDING, FULL],
                "query_pre_attn_scalar": 24,
                "rope_parameters": {
                    FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 3000.0},
                    SLIDING: {"rope_type": "default", "rope_theta": 200.0},
                },
            },
        }
    ),
}
GEMMA_CASES = {
    name: dataclasses.replace(case, norm_mean=0.0) for name, case in _GEMMA_CASES.items()
}
PHI_CASES = {
    "phi3": FamilyCase(
        {
            "model_type": "phi3",
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": SHORT_8,
                "long_factor": LONG_8,
            },
        },
        sequence_lens=AROUND_32,
    ),
    "phi4_mini": FamilyCase(
        {
            "model_type": "phi3",
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "sliding_window": 21,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT_6, "long_factor": LONG_6},
        },
        GgufForm(
            "phi3",
            METADATA
            | {
                "attention.head_count": 2,
                "attention.head_count_kv": 1,
                "attention.layer_norm_rms_epsilon": 1e-5,
                "attention.sliding_window": 21,
                "rope.dimension_count": 12,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.attn_factor": (1 + np.log(4) / np.log(32)) ** 0.5,
            },
            _with_factors(SHORT_6, LONG_6),
        ),
        sequence_lens=AROUND_32,
    ),
}
OLMO_CASES = {
    "olmo2": FamilyCase(
        {"model_type": "olmo2", "rms_norm_eps": None, "attention_bias": True},
        GgufForm("olmo2", METADATA | {"attention.layer_norm_rms_epsilon": 1e-5}),
    ),
    "olmo3": FamilyCase(
        {
            "model_type": "olmo3",
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_theta": 500_000.0,
            # Not the default 1.14: a file's factor is the whole temperature.
            "rope_scaling": YARN | {"rope_type": "yarn", "attention_factor": 1.3},
        },
        GgufForm(
            "olmo2",
            METADATA
            | {
                "block_count": 4,
                "attention.layer_norm_rms_epsilon": 1e-5,
                "attention.sliding_window": 9,
                "attention.sliding_window_pattern": [True, True, True, False],
                "rope.freq_base": 500_000.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.attn_factor": 1.3,
                "rope.scaling.original_context_length": 32,
            },
        ),
    ),
}
GRANITE_CASES = {
    "granite": FamilyCase(
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        GgufForm(
            "granite",
            METADATA
            | {
                "attention.scale": 0.2,
                "embedding_scale": 3.0,
                "residual_scale": 0.6,
                "logit_scale": 1.7,
            },
            _pair_heads,
        ),
    ),
}
CASES: dict[str, FamilyCase] = {
    **LLAMA_CASES,
    **MISTRAL_CASES,
    **QWEN_CASES,
    **SMOLLM_CASES,
    **GEMMA_CASES,
    **PHI_CASES,
    **OLMO_CASES,
    **GRANITE_CASES,
}
