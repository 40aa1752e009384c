"""The config.json of published DeepSeek models: their variants and numbers of parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxinfer.models import HF_FAMILIES
from jaxinfer.models.deepseek import config_from_gguf, config_from_hf
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.rope import Yarn

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
V2_LITE = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": COMMON["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        pytest.param(V2_LITE, 15_706_484_224, id="DeepSeek-V2-Lite"),
        pytest.param(V2, 235_741_434_880, id="DeepSeek-V2"),
        # With the routers' biases, without the multi-token prediction module.
        pytest.param(V3, 671_026_419_200, id="DeepSeek-V3 and R1"),
    ],
)
def test_published_model_has_the_stated_number_of_parameters(config, num_parameters):
    family = HF_FAMILIES[config["model_type"]]
    model = FunctionalModel(family, family.config_from_hf(config, {}), Numerics())
    assert model.num_parameters == num_parameters


def test_v3_has_latents_groups_and_yarn_temperature_in_its_scale():
    config = config_from_hf(V3, {})
    assert config.cache == (61, 1, 576, 512)
    assert [layer.experts is None for layer in config.layers[:4]] == [True, True, True, False]
    rope = config.layer(0).rope
    assert rope is not None and rope.dim == 64 and isinstance(rope.scaling, Yarn)
    assert (rope.scaling.factor, rope.scaling.attention_factor) == (40, 1)
    assert config.attention_scale == pytest.approx(
        192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-12
    )
    experts = config.layer(60).experts
    assert experts is not None and experts.shared_ffn_dim == 2048
    router = experts.router
    assert (router.num_groups, router.groups_per_token, router.group_score) == (8, 4, "best_two")
    assert router.renormalize and router.scale == 2.5 and router.score == "sigmoid"


def test_v2_lite_has_no_query_latent_and_routes_by_softmax():
    config = config_from_hf(V2_LITE, {})
    assert config.latent is not None and config.latent.q_rank is None
    experts = config.layer(1).experts
    assert experts is not None and experts.shared_ffn_dim == 2816
    assert experts.router.num_groups == 1 and not experts.router.renormalize


def test_moe_layer_freq_selects_the_layers_with_experts():
    layers = config_from_hf(V2_LITE | {"moe_layer_freq": 2}, {}).layers
    assert [i for i, layer in enumerate(layers) if layer.experts] == list(range(2, 27, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; only 128 is supported"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; deepseek_v3 has 'noaux_tc'"),
        ({"n_group": 7}, "256 experts do not make 7 groups"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None; it must be a whole number"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0; it must be a whole number of at least 1"),
        ({"qk_rope_head_dim": 63}, "rope.dim is 63; it must be even"),
        ({"index_topk": 2048}, "index_topk is 2048"),
        ({"mlp_bias": True}, "mlp_bias is True"),
    ],
)
def test_unsupported_config_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(V3 | changes, {})


def test_norm_topk_prob_of_v2_is_refused():
    with pytest.raises(ValueError, match="norm_topk_prob is True"):
        config_from_hf(V2 | {"norm_topk_prob": True}, {})


def test_gguf_file_with_unknown_keys_or_gates_is_refused():
    keys = {"expert_gating_func": 3, "block_count": 2, "embedding_length": 32, "expert_count": 4}
    keys |= {"attention.head_count": 4, "attention.key_length": 16, "attention.value_length": 8}
    keys |= {"attention.kv_lora_rank": 8, "rope.dimension_count": 4, "context_length": 64}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 160, "expert_used_count": 2}
    keys |= {"feed_forward_length": 48, "expert_feed_forward_length": 16}
    metadata = {f"deepseek2.{key}": value for key, value in keys.items()}
    old_v3 = {"deepseek2.expert_gating_func": 2, "deepseek2.expert_count": 256}
    experts = config_from_gguf(metadata | old_v3, {}).layers[-1].experts
    router = experts and experts.router
    assert router
    assert (router.num_groups, router.groups_per_token) == (8, 4), "files do not say, at first"
    with pytest.raises(ValueError, match="expert_gating_func is 3"):
        config_from_gguf(metadata, {})
    with pytest.raises(ValueError, match=r"sets deepseek2\.attention\.sliding_window"):
        config_from_gguf(metadata | {"deepseek2.attention.sliding_window": 5}, {})
