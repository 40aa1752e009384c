"""The config.json of published dense models: their sizes, variants and numbers of parameters.

The number of parameters is that of the published weights, or of the text model's weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.rope import LinearScaling, Llama3, LongRope, Rope, Yarn

GELU = "gelu_pytorch_tanh"


def shape(vocab: int, dim: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any):
    """Return config.json's keys for the sizes."""
    return {
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def published(
    count: int, config: dict[str, Any], *ropes: Rope | None, windows=(None,), **fields: Any
):
    """Return a case: the number of parameters, config.json, and the expected ropes and windows of
    the first layers, and other fields by name."""
    return count, config, ropes, windows, fields


MISTRAL = {"model_type": "mistral", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "use_sliding_window": False}
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "attention_bias": False, "max_window_layers": 36}
QWEN3 |= {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
LLAMA3 = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "mlp_bias": False}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_act": GELU,
    "hidden_activation": GELU,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
}
PHI3 = {"model_type": "phi3", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
SHORT, LONG = [1.0 + i / 48 for i in range(48)], [1.0 + i for i in range(48)]
LONGROPE = {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}
LONG_ROPE = LongRope(
    tuple(SHORT), tuple(LONG), 4096, attention_factor=(1 + np.log(32) / np.log(4096)) ** 0.5
)
CAPS = {"attention_soft_cap": 50.0, "logits_soft_cap": 30.0}
NO_CAPS = {"attention_soft_cap": None, "logits_soft_cap": None}
OLMO2 = {"rms_norm_eps": 1e-6, "rope_theta": 500000, "tie_word_embeddings": False}
AFTER = {"norms": "after", "qk_norm": "all"}


def llama3(factor: float) -> dict[str, Any]:
    """Return the `rope_scaling` of Llama 3.1 and later."""
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def gemma3(**text: Any) -> dict[str, Any]:
    """Return the published config of a Gemma 3 with images, without the text model's defaults."""
    return {
        "model_type": "gemma3",
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
    }


GEMMA3_ROPES = [Rope(1e4, 256)] * 5 + [Rope(1e6, 256, LinearScaling(8.0))]
OF_GEMMA3 = {
    **{"vocab_size": 262_208, "max_len": 131_072, "norm_eps": 1e-6, "qk_norm": "head"},
    **{"windows": (1024, 1024, 1024, 1024, 1024, None)} | NO_CAPS,
}
PUBLISHED = {
    "Llama-3.1-8B": published(
        8_030_261_248,
        LLAMA3
        | shape(128256, 4096, 14336, 32, 32, 8, rope_scaling=llama3(8.0))
        | {"max_position_embeddings": 131072, "tie_word_embeddings": False},
        Rope(500000.0, 128, Llama3(8.0, 1.0, 4.0, 8192)),
        is_tied=False,
    ),
    "Llama-3.2-1B": published(
        1_235_814_400,
        LLAMA3
        | shape(128256, 2048, 8192, 16, 32, 8, head_dim=64, rope_scaling=llama3(32.0))
        | {"max_position_embeddings": 131072, "tie_word_embeddings": True},
        Rope(500000.0, 64, Llama3(32.0, 1.0, 4.0, 8192)),
        is_tied=True,
    ),
    "Mistral-7B-v0.1": published(
        7_241_732_096,
        MISTRAL
        | shape(32000, 4096, 14336, 32, 32, 8, sliding_window=4096, rope_theta=10000.0)
        | {"max_position_embeddings": 32768},
        Rope(10000.0, 128),
        windows=(4096,),
        max_len=32768,
        norm_eps=1e-5,
    ),
    "Mistral-7B-v0.3": published(
        7_248_023_552,
        MISTRAL
        | shape(32768, 4096, 14336, 32, 32, 8, sliding_window=None, rope_theta=1e6)
        | {"max_position_embeddings": 32768},
        Rope(1e6, 128),
    ),
    "Mistral-Nemo-2407": published(
        12_247_782_400,
        MISTRAL
        | shape(131072, 5120, 14336, 40, 32, 8, sliding_window=None, rope_theta=1e6, head_dim=128)
        | {"max_position_embeddings": 131072},
        Rope(1e6, 128),
        head_dim=128,
    ),
    "Ministral-8B-2410": published(
        8_019_808_256,
        MISTRAL
        | shape(131072, 4096, 12288, 36, 32, 8, sliding_window=32768, rope_theta=1e8, head_dim=128)
        | {"max_position_embeddings": 32768},
        Rope(1e8, 128),
        windows=(32768,),
    ),
    "Mistral-Small-3.1-24B": published(
        23_572_403_200,
        {"model_type": "mistral3", "image_token_index": 10}
        | {
            "text_config": MISTRAL
            | shape(131072, 5120, 32768, 40, 32, 8, sliding_window=None, rope_theta=1e9)
            | {"head_dim": 128, "max_position_embeddings": 131072}
        },
        Rope(1e9, 128),
    ),
    "Qwen2.5-0.5B": published(
        494_032_768,
        QWEN2
        | shape(151936, 896, 4864, 24, 14, 2, sliding_window=32768, max_window_layers=24)
        | {"tie_word_embeddings": True, "rope_theta": 1e6, "max_position_embeddings": 32768},
        Rope(1e6, 64),
        qkv_bias=True,
        out_bias=False,
        is_tied=True,
    ),
    "Qwen2.5-7B": published(
        7_615_616_512,
        QWEN2
        | shape(152064, 3584, 18944, 28, 28, 4, sliding_window=131072, max_window_layers=28)
        | {"tie_word_embeddings": False, "rope_theta": 1e6, "max_position_embeddings": 131072},
        Rope(1e6, 128),
        is_tied=False,
    ),
    "Qwen3-0.6B": published(
        596_049_920,
        QWEN3
        | shape(151936, 1024, 3072, 28, 16, 8, rope_theta=1e6, tie_word_embeddings=True)
        | {"sliding_window": None, "use_sliding_window": False},
        Rope(1e6, 128),
        qk_norm="head",
        qkv_bias=False,
    ),
    "Qwen3-8B": published(
        8_190_735_360,
        QWEN3 | shape(151936, 4096, 12288, 36, 32, 8, rope_theta=1e6, tie_word_embeddings=False),
        Rope(1e6, 128),
        qk_norm="head",
    ),
    "SmolLM3-3B": published(
        3_075_098_624,
        {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0] * 9, "rope_theta": 5e6}
        | shape(128256, 2048, 11008, 36, 16, 4, max_position_embeddings=65536, rms_norm_eps=1e-6)
        | {"layer_types": ["full_attention"] * 36, "use_sliding_window": False},
        *(Rope(5e6, 128), Rope(5e6, 128), Rope(5e6, 128), None),
        is_tied=True,
    ),
    "gemma-2b": published(
        2_506_172_416,
        {"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "rope_theta": 10000.0}
        | shape(256000, 2048, 16384, 18, 8, 1, hidden_activation=None)
        | {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6},
        Rope(10000.0, 256),
        activation=GELU,
        norm_offset=1.0,
        embedding_scale=2048**0.5,
        is_tied=True,
    ),
    "gemma-2-2b": published(
        2_614_341_888,
        GEMMA2 | shape(256000, 2304, 9216, 26, 8, 4),
        Rope(10000.0, 256),
        windows=(4096, None, 4096, None),
        attention_scale=1 / 16,
        norms="around",
        activation=GELU,
        **CAPS,
    ),
    "gemma-2-27b": published(
        27_227_128_320,
        GEMMA2 | shape(256000, 4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
        Rope(10000.0, 128),
        windows=(4096, None),
        attention_scale=1 / 12,
        **CAPS,
    ),
    "gemma-3-1b": published(
        999_885_952,
        {"model_type": "gemma3_text", "head_dim": 256, "hidden_activation": GELU}
        | shape(262144, 1152, 6912, 26, 4, 1, rope_theta=1_000_000, rope_local_base_freq=10_000)
        | {"query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_scaling": None}
        | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        *[Rope(1e4, 256)] * 5,
        Rope(1e6, 256),
        windows=(512, 512, 512, 512, 512, None, 512),
        qk_norm="head",
        **NO_CAPS,
    ),
    "gemma-3-270m": published(
        268_098_176,
        {"model_type": "gemma3_text", "head_dim": 256, "hidden_activation": GELU}
        | shape(262144, 640, 2048, 18, 4, 1, rope_theta=1e6, rope_local_base_freq=1e4)
        | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3}
        | {"query_pre_attn_scalar": 256, "sliding_window": 512, "rope_scaling": None}
        | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        *[Rope(1e4, 256)] * 5,
        Rope(1e6, 256),
        windows=(512, 512, 512, 512, 512, None, 512),
        attention_scale=1 / 16,
        **NO_CAPS,
    ),
    "gemma-3-4b": published(
        3_880_263_168,
        gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
        *GEMMA3_ROPES,
        **OF_GEMMA3,
    ),
    "gemma-3-12b": published(
        11_766_034_176,
        gemma3(
            **{"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48},
            **{"num_attention_heads": 16, "num_key_value_heads": 8},
        ),
        *GEMMA3_ROPES,
        attention_scale=1 / 16,
        **OF_GEMMA3,
    ),
    "gemma-3-27b": published(
        27_009_346_304,
        gemma3(
            **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62},
            **{"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128},
            query_pre_attn_scalar=168,
        ),
        *(dataclasses.replace(rope, dim=128) for rope in GEMMA3_ROPES),
        attention_scale=168**-0.5,
        **OF_GEMMA3,
    ),
    "Phi-3-mini-4k": published(
        3_821_079_552,
        PHI3
        | shape(32064, 3072, 8192, 32, 32, 32, sliding_window=2047, rope_scaling=None)
        | {"max_position_embeddings": 4096},
        Rope(10000.0, 96),
        windows=(2047,),
    ),
    "Phi-3.5-mini": published(
        3_821_079_552,
        PHI3
        | shape(32064, 3072, 8192, 32, 32, 32, sliding_window=262144, rope_scaling=LONGROPE)
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
        Rope(10000.0, 96, LONG_ROPE),
        windows=(262144,),
        length_limit=4096,
    ),
    "Phi-3-mini-128k, of 2024": published(
        3_821_079_552,
        PHI3
        | shape(32064, 3072, 8192, 32, 32, 32, rope_scaling=LONGROPE | {"type": "su"})
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
        Rope(10000.0, 96, LONG_ROPE),
    ),
    "Phi-4": published(
        14_659_507_200,
        PHI3
        | shape(100352, 5120, 17920, 40, 40, 10, sliding_window=None, rope_theta=250000)
        | {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384},
        Rope(250000.0, 128),
    ),
    "Phi-4-mini": published(
        3_836_021_760,
        PHI3
        | shape(200064, 3072, 8192, 32, 24, 8, sliding_window=262144, rope_scaling=LONGROPE)
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
        | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        Rope(10000.0, 96, LONG_ROPE),
        windows=(262144,),
        is_tied=True,
        head_dim=128,
    ),
    "OLMo-2-7B": published(
        7_298_617_344,
        {"model_type": "olmo2"}
        | OLMO2
        | shape(100352, 4096, 11008, 32, 32, 32)
        | {"max_position_embeddings": 4096},
        Rope(500000.0, 128),
        **AFTER,
    ),
    "OLMo-3-7B": published(
        7_298_011_136,
        {"model_type": "olmo3", "sliding_window": 4096, "max_position_embeddings": 65536}
        | OLMO2
        | shape(100278, 4096, 11008, 32, 32, 32)
        | {
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
        *[Rope(500000.0, 128)] * 3,
        Rope(500000.0, 128, Yarn(8.0, 8192, 32.0, 1.0, attention_factor=1.2079441541679836)),
        windows=(4096, 4096, 4096, None),
        **AFTER,
    ),
    "granite-3.3-8b": published(
        8_170_864_640,
        {"model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125}
        | shape(49159, 4096, 12800, 40, 32, 8, residual_multiplier=0.22, logits_scaling=16.0)
        | {"rope_theta": 10000000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
        | {"max_position_embeddings": 131072},
        Rope(1e7, 128),
        embedding_scale=12.0,
        attention_scale=0.0078125,
        residual_scale=0.22,
        logits_scale=1 / 16,
    ),
}


def num_parameters(family, config) -> int:
    """Return the model's number of parameters, from one and from two of its equal layers."""
    count = lambda n: (
        FunctionalModel(
            family, dataclasses.replace(config, num_layers=n), Numerics()
        ).num_parameters
    )
    one = count(1)
    return one + (config.num_layers - 1) * (count(2) - one)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_with_its_sizes_and_variants(name):
    count, json, ropes, windows, fields = PUBLISHED[name]
    family = HF_FAMILIES[json["model_type"]]
    config = family.config_from_hf(json, {})
    assert [config.layer(i).rope for i in range(len(ropes))] == list(ropes)
    assert [config.layer(i).window for i in range(len(windows))] == list(windows)
    stated = {"norm_eps": "rms_norm_eps", "max_len": "max_position_embeddings"}
    text = json.get("text_config", json)
    fields = {name: text[key] for name, key in stated.items() if key in text} | fields
    assert {name: getattr(config, name) for name in {*stated, *fields}} == fields
    assert num_parameters(family, config) == count
