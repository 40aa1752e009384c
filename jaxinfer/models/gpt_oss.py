"""gpt-oss: experts with a clamped gate, attention sinks, a window in every other layer, biases
throughout (arXiv:2508.10925).

It is published with experts in MXFP4; bfloat16 files have the same tensor names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_HALVES_ROWS, GGUF_IGNORED, HF_IGNORED, HF_ROWS
from jaxinfer.models.experts import (
    EXPERT_KEYS,
    GGUF_EXPERTS_ROWS,
    layers_from_gguf,
    mixed_layers,
    num_experts,
)
from jaxinfer.models.family import LINEAR, Family, Weight, WeightTable, every_other
from jaxinfer.models.gguf_config import GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf
from jaxinfer.nn.experts import ClampedSwiGLU, ExpertsConfig, RouterConfig
from jaxinfer.nn.rope import Yarn

# The defaults of `GptOssConfig`.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_BLOCK, _LAYER = r"blocks\.(\d+)\.", r"model.layers.\1."
_EXPERTS = _LAYER + "mlp.experts."
HF_WEIGHTS = WeightTable(
    (
        Weight(_BLOCK + r"attention\.sinks", _LAYER + "self_attn.sinks"),
        Weight(_BLOCK + r"mlp\.router", _LAYER + "mlp.router.weight", LINEAR),
        Weight(_BLOCK + r"mlp\.router_bias", _LAYER + "mlp.router.bias"),
        # Gate and up are interleaved.
        Weight(_BLOCK + r"mlp\.gate", _EXPERTS + "gate_up_proj", every_other(0)),
        Weight(_BLOCK + r"mlp\.up", _EXPERTS + "gate_up_proj", every_other(1)),
        Weight(_BLOCK + r"mlp\.gate_bias", _EXPERTS + "gate_up_proj_bias", every_other(0)),
        Weight(_BLOCK + r"mlp\.up_bias", _EXPERTS + "gate_up_proj_bias", every_other(1)),
        Weight(_BLOCK + r"mlp\.down", _EXPERTS + "down_proj"),
        Weight(_BLOCK + r"mlp\.down_bias", _EXPERTS + "down_proj_bias"),
        *HF_ROWS,
    ),
    HF_IGNORED,
)
GGUF_WEIGHTS = WeightTable(
    (
        Weight(_BLOCK + r"attention\.sinks", r"blk.\1.attn_sinks.weight"),
        Weight(_BLOCK + r"mlp_norm\.weight", r"blk.\1.post_attention_norm.weight"),
        *GGUF_EXPERTS_ROWS,
        *GGUF_HALVES_ROWS,
    ),
    GGUF_IGNORED,
)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take `GptOssConfig`'s defaults, except for sizes."""
    config = DEFAULTS | dict(config)
    if not any(hf_config.get_object(config, key) for key in ("rope_parameters", "rope_scaling")):
        config["rope_parameters"] = YARN
    ffn_dim, per_token = hf_config.require_ints(config, "intermediate_size", "num_experts_per_tok")
    fields = hf_config.decoder_fields(config)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"], theta=150_000.0)
    windows = hf_config.layer_windows(
        config, fields["num_layers"], config["sliding_window"], lambda i: i % 2 == 0
    )
    # A softmax over the chosen logits equals the softmax over all, renormalized.
    router = RouterConfig(num_experts(config), per_token, renormalize=True, has_bias=True)
    activation = ClampedSwiGLU(
        hf_config.get_float(config, "swiglu_alpha"), hf_config.get_float(config, "swiglu_limit")
    )
    experts = ExpertsConfig(router, ffn_dim, activation, bias=True)
    layers = [LayerConfig(rope, ffn_dim, window) for window in windows]
    has_bias = bool(config["attention_bias"])
    return DecoderConfig(
        layers=mixed_layers(layers, experts, [True] * len(layers)),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
        **fields,
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values.

    They do not state the constants of the activation, which layers are sliding, or that YaRN's
    limits are not rounded; those of the published models are used.
    """
    keys = GgufKeys(metadata, "gpt-oss")
    keys.refuse_unread(EXPERT_KEYS | {"attention.sliding_window"})
    fields = gguf_config.decoder_fields(keys, tensors)
    rope = rope_from_gguf(metadata, keys.architecture, fields["head_dim"], tensors)
    if isinstance(rope.scaling, Yarn):
        rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, truncate=False))
    activation = ClampedSwiGLU(DEFAULTS["swiglu_alpha"], DEFAULTS["swiglu_limit"])
    layers = layers_from_gguf(
        keys,
        tensors,
        rope,
        renormalize=True,
        windows=(keys.get_int("attention.sliding_window"), None),
        activation=activation,
        bias=True,
    )
    return DecoderConfig(layers=layers, has_sinks=True, **fields)


GPT_OSS = Family(
    name="gpt_oss",
    models="gpt-oss 20B, 120B",
    build=Decoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
