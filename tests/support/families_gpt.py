"""Cases of the GPT-2-like families, GPT-NeoX and BLOOM (see `family_bench.py`)."""

from __future__ import annotations

import numpy as np

from tests.support.family_bench import COMMON, FamilyCase, GgufForm, Tensors

NUM_HEADS = 4
# These families have other keys for the sizes in `COMMON`; the keys that they lack are removed.
_NO_COMMON = {key: None for key in COMMON if key not in ("vocab_size", "num_hidden_layers")}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _without_conv1d(name: str, values: np.ndarray) -> Tensors:
    """Transpose GPT-2's matrices [inputs, outputs] to [outputs, inputs], as a GGUF file has."""
    is_product = ".c_" in name and name.endswith("weight")
    return {name: values.T if is_product else values}


def _rows_of_q_then_k_then_v(name: str, values: np.ndarray) -> Tensors:
    name = name.removeprefix("transformer.")  # for BLOOM, as its converter does
    if "query_key_value" not in name:
        return {name: values}
    heads = values.reshape(NUM_HEADS, 3, -1, *values.shape[1:])
    return {name: heads.swapaxes(0, 1).reshape(values.shape)}


def _gpt2(config: dict, gguf: GgufForm | None = None, seed: int = 0) -> FamilyCase:
    own = {"model_type": "gpt2", "n_embd": 32, "n_head": NUM_HEADS, "n_positions": 128}
    common = _NO_COMMON | _TOKENS | {"num_hidden_layers": None, "n_layer": 2}
    return FamilyCase(common | own | config, gguf, seed)


def _neox(config: dict, gguf: GgufForm | None = None, seed: int = 0) -> FamilyCase:
    own = {"model_type": "gpt_neox", "num_key_value_heads": None, "layer_norm_eps": 1e-5}
    return FamilyCase(own | config, gguf, seed)


def _bloom(config: dict, gguf: GgufForm | None = None, seed: int = 0) -> FamilyCase:
    own = {"model_type": "bloom", "n_head": NUM_HEADS, "hidden_size": 32, "seq_length": 128}
    common = _NO_COMMON | _TOKENS | {"num_hidden_layers": None, "n_layer": 2}
    return FamilyCase(common | own | config, gguf, seed)


_SIZES = {
    "context_length": 128,
    "embedding_length": 32,
    "block_count": 2,
    "attention.head_count": NUM_HEADS,
    "attention.layer_norm_epsilon": 1e-5,
}

CASES: dict[str, FamilyCase] = {
    "gpt2": _gpt2(
        {"activation_function": "gelu_new"},
        GgufForm("gpt2", _SIZES | {"feed_forward_length": 128}, _without_conv1d),
    ),
    "gpt2_scales": _gpt2(
        {
            "n_inner": 48,
            "activation_function": "gelu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "tie_word_embeddings": False,
        },
        seed=1,
    ),
    "gpt_neox": _neox(
        {"hidden_act": "gelu", "rotary_pct": 0.5, "rotary_emb_base": 500},
        GgufForm(
            "gptneox",
            _SIZES
            | {
                "feed_forward_length": 48,
                "rope.dimension_count": 4,
                "rope.freq_base": 500.0,
                "use_parallel_residual": True,
            },
            _rows_of_q_then_k_then_v,
        ),
        seed=2,
    ),
    "gpt_neox_sequential": _neox(
        {
            "hidden_act": "gelu_fast",
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 2.0,
                "rope_theta": 300.0,
                "partial_rotary_factor": 1.0,
            },
        },
        seed=3,
    ),
    "bloom": _bloom(
        {},
        GgufForm("bloom", _SIZES | {"feed_forward_length": 128}, _rows_of_q_then_k_then_v),
        seed=4,
    ),
    # With six heads, the slopes of the last two are between those of the first four.
    "bloom_norm_residual": _bloom(
        {"apply_residual_connection_post_layernorm": True, "n_head": 6, "hidden_size": 48},
        seed=5,
    ),
    "opt": FamilyCase(
        {
            "model_type": "opt",
            "intermediate_size": None,
            "num_key_value_heads": None,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "tie_word_embeddings": True,
            "activation_function": "relu",
        },
        seed=6,
    ),
}
