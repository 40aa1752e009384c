"""DeepSeek-V2 (arXiv:2405.04434) and V3/R1 (arXiv:2412.19437): latent attention, and experts in all
layers but the first.

The multi-token prediction modules after the last layer of V3's files are not run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.deepseek_weights import gguf_weights, hf_weights
from jaxinfer.models.family import Family
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys, has_block_tensor
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf
from jaxinfer.nn.experts import ExpertsConfig, RouterConfig
from jaxinfer.nn.latent_attention import LatentConfig
from jaxinfer.nn.rope import Rope, Yarn

# The published code does not pass rms_norm_eps to the latents' norms; this is their default.
LATENT_EPS = 1e-6


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take the defaults of `DeepseekV2Config` or `DeepseekV3Config`.

    RoPE rotates adjacent pairs, which the weight tables reorder into halves; `rope_interleave`
    false (V3 only) therefore changes only the tables.
    """
    is_v3 = config["model_type"] == "deepseek_v3"
    given = {
        "first_k_dense_replace": 3 if is_v3 else 0,
        "max_position_embeddings": 4096 if is_v3 else 2048,
        "moe_layer_freq": 1,
    } | dict(config)
    heads = config.get("num_attention_heads")
    hf_config.refuse_unsupported(config, num_key_value_heads=heads, mlp_bias=False, index_topk=None)
    fields = hf_config.decoder_fields({**given, "num_key_value_heads": 1, "head_dim": 1})
    latent = _latent_from_hf(
        config, is_interleaved=not is_v3 or config.get("rope_interleave", True)
    )
    rope = rope_from_hf(config, latent.rope_dim, fields["max_len"])
    fields |= {"head_dim": latent.key_dim}
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    dense = LayerConfig(rope, ffn_dim)
    first = hf_config.get_int(given, "first_k_dense_replace", least=0)
    every = hf_config.get_int(given, "moe_layer_freq")
    sparse = [i >= first and i % every == 0 for i in range(fields["num_layers"])]
    layers = [dense] * len(sparse)
    if any(sparse):
        experts = _experts_from_hf(config, is_v3, fields["activation"])
        mixture = LayerConfig(rope, None, experts=experts)
        layers = [mixture if is_sparse else dense for is_sparse in sparse]
    return DecoderConfig(
        layers=tuple(layers),
        attention_scale=_scale_from_hf(config, rope, latent),
        latent=latent,
        **fields,
    )


def _latent_from_hf(config: Mapping[str, Any], *, is_interleaved: bool) -> LatentConfig:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentConfig(
        *hf_config.require_ints(config, *names),
        q_rank=config.get("q_lora_rank", 1536),
        norm_eps=LATENT_EPS,
        has_bias=bool(config.get("attention_bias", False)),
        is_interleaved=bool(is_interleaved),
    )


def _scale_from_hf(config: Mapping[str, Any], rope: Rope, latent: LatentConfig) -> float:
    """Return the scale of scores.

    YaRN's temperature for all dimensions (`mscale_all_dim`) applies to queries and to keys, so that
    its square multiplies the scale.
    """
    sections = (hf_config.get_object(config, key) for key in ("rope_scaling", "rope_parameters"))
    given = dict(next(sections)) | dict(next(sections))
    mscale = given.get("mscale_all_dim")
    factor = getattr(rope.scaling, "factor", 1.0)
    if not mscale or given.get("rope_type", given.get("type", "default")) == "default":
        return latent.head_dim**-0.5
    multiplier = 0.1 * hf_config.get_float(given, "mscale_all_dim")
    return latent.head_dim**-0.5 * _temperature(multiplier, factor) ** 2


def _temperature(multiplier: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 1.0 + multiplier * math.log(factor)


def _experts_from_hf(config: Mapping[str, Any], is_v3: bool, activation: str) -> ExpertsConfig:
    num_experts, per_token, ffn_dim = hf_config.require_ints(
        config, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"
    )
    num_shared = config.get("n_shared_experts", 1 if is_v3 else 2)  # null means none
    if num_shared and "n_shared_experts" in config:
        num_shared = hf_config.get_int(config, "n_shared_experts")
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    methods = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if method not in methods:
        known = " and ".join(map(repr, methods))
        raise ValueError(f"topk_method is {method!r}; {config['model_type']} has {known}")
    hf_config.refuse_unsupported(config, scoring_func="sigmoid" if is_v3 else "softmax")
    if not is_v3 and config.get("norm_topk_prob"):
        raise ValueError(
            "norm_topk_prob is True, but the two published versions of DeepSeek-V2 differ in "
            "how it combines with routed_scaling_factor; all its checkpoints have False"
        )
    num_groups, groups_per_token = 1, 1
    if method != "greedy":
        groups = config if not is_v3 else {"n_group": 8, "topk_group": 4} | dict(config)
        num_groups, groups_per_token = hf_config.require_ints(groups, "n_group", "topk_group")
    router = RouterConfig(
        num_experts,
        per_token,
        score="sigmoid" if is_v3 else "softmax",
        renormalize=is_v3 and bool(config.get("norm_topk_prob", True)),
        scale=hf_config.get_float(config, "routed_scaling_factor", 2.5 if is_v3 else 1.0),
        has_selection_bias=is_v3,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        group_score="best_two" if is_v3 else "best",
    )
    shared = num_shared * ffn_dim if num_shared else None
    return ExpertsConfig(router, ffn_dim, activation, shared_ffn_dim=shared)


_GGUF_READ = (DECODER_KEYS - {"rope.scaling.yarn_attn_factor"}) | {
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "rope.scaling.yarn_log_multiplier",
    "leading_dense_block_count",
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
    "expert_feed_forward_length",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
}
_GATES = {1: "softmax", 2: "sigmoid"}


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values.

    In newer files key_length and value_length are those of the cache, and `key_length_mla` and
    `value_length_mla` are a head's; in older ones key_length and value_length are a head's.
    """
    keys = GgufKeys(metadata, "deepseek2")
    keys.refuse_unread(_GGUF_READ)
    head_dim = keys.get_int("attention.key_length_mla", keys.get_int("attention.key_length"))
    value_dim = keys.get_int("attention.value_length_mla", keys.get_int("attention.value_length"))
    rope = rope_from_gguf(metadata, "deepseek2", keys.get_int("rope.dimension_count"), tensors)
    multiplier, factor = keys.get_scale("rope.scaling.yarn_log_multiplier", 0.0), 1.0
    if isinstance(rope.scaling, Yarn):  # the whole temperature is in the scale of scores
        factor = rope.scaling.factor
        scaling = dataclasses.replace(rope.scaling, attention_factor=1.0)
        rope = dataclasses.replace(rope, scaling=scaling)
    latent = LatentConfig(
        keys.get_int("attention.kv_lora_rank"),
        head_dim - rope.dim,
        rope.dim,
        value_dim,
        q_rank=keys.get("attention.q_lora_rank"),
        norm_eps=LATENT_EPS,
        is_kv_split=has_block_tensor(tensors, "attn_k_b.weight"),
    )
    stated = {"attention.key_length": latent.key_dim, "attention.value_length": latent.key_dim}
    one_head = {**metadata, **{f"deepseek2.{name}": value for name, value in stated.items()}}
    fields = gguf_config.decoder_fields(GgufKeys(one_head, "deepseek2"), tensors)
    fields |= {"num_kv_heads": 1, "qkv_bias": False}
    num_dense = min(keys.get_int("leading_dense_block_count", 0, least=0), fields["num_layers"])
    layers = [LayerConfig(rope, keys.get_int("feed_forward_length"))] * num_dense
    if num_dense < fields["num_layers"]:
        experts = LayerConfig(rope, None, experts=_experts_from_gguf(keys, tensors))
        layers += [experts] * (fields["num_layers"] - num_dense)
    return DecoderConfig(
        layers=tuple(layers),
        attention_scale=latent.head_dim**-0.5 * _temperature(multiplier, factor) ** 2,
        latent=latent,
        **fields,
    )


# Files from before `expert_group_count` do not state that V3 and R1 choose 4 of 8 groups first.
# Other models with this architecture and sigmoid gates have other numbers of experts and no groups.
V3_EXPERTS = 256


def _experts_from_gguf(keys: GgufKeys, tensors: Mapping[str, Any]) -> ExpertsConfig:
    gate = keys.get("expert_gating_func", 1)
    if gate not in list(_GATES):  # of any type
        raise ValueError(f"deepseek2.expert_gating_func is {gate}; the supported ones are {_GATES}")
    ffn_dim = keys.get_int("expert_feed_forward_length")
    num_shared = keys.get_int("expert_shared_count", 0, least=0)
    num_experts = keys.get_int("expert_count")
    num_groups, groups_per_token = (8, 4) if gate == 2 and num_experts == V3_EXPERTS else (1, 1)
    router = RouterConfig(
        num_experts,
        keys.get_int("expert_used_count"),
        score="sigmoid" if gate == 2 else "softmax",
        renormalize=bool(keys.get("expert_weights_norm", False)),
        scale=keys.get_scale("expert_weights_scale"),
        has_selection_bias=has_block_tensor(tensors, "exp_probs_b.bias"),
        num_groups=keys.get_int("expert_group_count", num_groups),
        groups_per_token=keys.get_int("expert_group_used_count", groups_per_token),
        group_score="best_two" if gate == 2 else "best",
    )
    shared = num_shared * ffn_dim if num_shared else None
    return ExpertsConfig(router, ffn_dim, shared_ffn_dim=shared)


DEEPSEEK = Family(
    name="deepseek",
    build=Decoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=hf_weights,
    gguf_weights=gguf_weights,
    models="DeepSeek-V2 and V2-Lite, V3, R1",
)
