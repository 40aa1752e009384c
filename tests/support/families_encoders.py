"""Cases of the encoders (see `family_bench.py`), whose hidden states are recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.family_bench import FamilyCase, GgufForm, Tensors

COMMON: dict[str, Any] = {"num_key_value_heads": None, "tie_word_embeddings": None}
ROBERTA: dict[str, Any] = COMMON | {
    "pad_token_id": 1,
    "bos_token_id": 0,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 66,  # no token takes the first two
}


def _without_pooler(name: str, values: np.ndarray) -> Tensors:
    return {} if name.startswith("pooler") else {name: values}


def _without_first_positions(name: str, values: np.ndarray) -> Tensors:
    """Return RoBERTa's table as a converter writes it: from the first token's row."""
    if "position_embeddings" in name:
        values = values[2:]
    return _without_pooler(name, values)


def _metadata(max_len: int, eps: float) -> dict[str, Any]:
    return {
        "context_length": max_len,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": eps,
        "attention.causal": False,
        "pooling_type": 2,
    }


CASES: dict[str, FamilyCase] = {
    "bert": FamilyCase(
        COMMON | {"model_type": "bert"},
        gguf=GgufForm("bert", _metadata(128, 1e-12), _without_pooler),
    ),
    "bert_tanh_large_eps": FamilyCase(
        COMMON
        | {
            "model_type": "bert",
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-2,
            "type_vocab_size": 3,
        },
        seed=1,
    ),
    "bert_relu_one_head": FamilyCase(
        COMMON | {"model_type": "bert", "hidden_act": "relu", "num_attention_heads": 1}, seed=2
    ),
    "roberta": FamilyCase(ROBERTA | {"model_type": "roberta"}, seed=3),
    "xlm_roberta": FamilyCase(
        ROBERTA | {"model_type": "xlm-roberta"},
        gguf=GgufForm("bert", _metadata(64, 1e-5), _without_first_positions),
        seed=4,
    ),
    "camembert": FamilyCase(ROBERTA | {"model_type": "camembert", "hidden_act": "silu"}, seed=5),
}
