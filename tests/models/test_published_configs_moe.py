"""The config.json of published mixtures of experts: their variants and numbers of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from jaxinfer.models.decoder import DecoderConfig
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.experts import ClampedSwiGLU, ExpertsConfig, RouterConfig
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.rope import Rope, Yarn

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MIXTRAL_8X22B = MIXTRAL_8X7B | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
}
QWEN1_5 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_57B = QWEN1_5 | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 65536,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
PUBLISHED = {
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "Mixtral-8x22B": (MIXTRAL_8X22B, 140_620_634_112),
    "Qwen1.5-MoE-A2.7B": (QWEN1_5, 14_315_784_192),
    "Qwen2-57B-A14B": (QWEN2_57B, 57_408_658_944),
    "Qwen3-30B-A3B": (QWEN3_30B, 30_532_122_624),
    "Qwen3-235B-A22B": (QWEN3_235B, 235_093_634_560),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS_120B, 116_829_156_672),
}


def read(config: dict[str, Any]) -> DecoderConfig:
    return HF_FAMILIES[config["model_type"]].config_from_hf(config, {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_the_stated_number_of_parameters(name):
    config, count = PUBLISHED[name]
    model = FunctionalModel(HF_FAMILIES[config["model_type"]], read(config), Numerics())
    assert model.num_parameters == count


def test_mixtral_config_is_read():
    [layer] = set(read(MIXTRAL_8X7B).layers)
    assert layer.experts == ExpertsConfig(RouterConfig(8, 2, renormalize=True), 14336)
    assert (layer.rope, layer.window) == (Rope(1e6, 128), None)


def test_qwen2_moe_config_is_read():
    config = read(QWEN2_57B)
    [layer] = set(config.layers)
    assert layer.experts == ExpertsConfig(
        RouterConfig(64, 8), 2560, shared_ffn_dim=20480, has_shared_gate=True
    )
    assert (config.qkv_bias, config.out_bias, config.qk_norm) == (True, False, None)
    assert layer.window is None


def test_qwen3_moe_config_is_read():
    config = read(QWEN3_30B)
    [layer] = set(config.layers)
    assert layer.experts == ExpertsConfig(RouterConfig(128, 8, renormalize=True), 768)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, "head", 128)


def test_transformers_5_keys_are_read_alike():
    newer = QWEN3_30B | {
        "num_local_experts": 128,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    }
    for key in ("num_experts", "rope_theta", "rope_scaling"):
        del newer[key]
    assert read(newer) == read(QWEN3_30B)
    newer = GPT_OSS_20B | {
        "rope_parameters": GPT_OSS_20B["rope_scaling"] | {"rope_theta": 150000.0},
        "swiglu_alpha": 1.702,
    }
    for key in ("rope_theta", "rope_scaling"):
        del newer[key]
    assert read(newer) == read(GPT_OSS_20B)


def test_gpt_oss_config_is_read():
    config = read(GPT_OSS_20B)
    sliding, full = config.layers[:2]
    assert config.layers == (sliding, full) * 12
    assert (sliding.window, full.window) == (128, None)
    router = RouterConfig(32, 4, renormalize=True, has_bias=True)
    assert full.experts == ExpertsConfig(router, 2880, ClampedSwiGLU(1.702, 7.0), bias=True)
    assert full.rope is not None
    scaling = full.rope.scaling
    assert isinstance(scaling, Yarn)
    assert (scaling.factor, scaling.original_len, scaling.truncate) == (32.0, 4096, False)
    assert scaling.attention_factor == pytest.approx(1.3465735902799727)
    assert (config.qkv_bias, config.out_bias, config.has_sinks) == (True, True, True)


def test_gpt_oss_config_takes_its_defaults():
    bare = {
        key: value
        for key, value in GPT_OSS_20B.items()
        if key not in ("rope_scaling", "rope_theta", "head_dim", "layer_types", "swiglu_limit")
    }
    assert read(bare) == read(GPT_OSS_20B)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL_8X7B | {"num_local_experts": None}, "num_local_experts"),
        (MIXTRAL_8X7B | {"num_experts_per_tok": 9}, "per_token is 9"),
        (QWEN3_30B | {"num_experts": 0}, "num_experts is 0"),
        (QWEN3_30B | {"moe_intermediate_size": "768"}, "moe_intermediate_size"),
        (QWEN3_30B | {"hidden_act": "softsign"}, "hidden_act is 'softsign'"),
        (QWEN2_57B | {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
        (GPT_OSS_20B | {"layer_types": ["full_attention"]}, "1 entries for 24 layers"),
    ],
)
def test_unsupported_config_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        read(config)


def test_unread_gguf_key_is_refused():
    keys = {"expert_gating_func": 2, "block_count": 2, "embedding_length": 32, "expert_count": 4}
    for architecture in ("llama", "qwen2moe", "qwen3moe", "gpt-oss"):
        metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
        metadata[f"{architecture}.feed_forward_length"] = 64
        metadata[f"{architecture}.expert_used_count"] = 2
        read_gguf = GGUF_FAMILIES[architecture].config_from_gguf
        assert read_gguf is not None
        with pytest.raises(ValueError, match="expert_gating_func"):
            read_gguf(metadata, {})
