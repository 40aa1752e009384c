"""Granite 3: Llama's structure with multipliers of embedding, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_IGNORED, GGUF_ROWS, HF_IGNORED, HF_ROWS
from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf

HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
GGUF_WEIGHTS = WeightTable(GGUF_ROWS, GGUF_IGNORED)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """From config.json."""
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = hf_config.decoder_fields(config)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    has_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        layers=(LayerConfig(rope, ffn_dim),),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        embedding_scale=hf_config.get_float(config, "embedding_multiplier", 1.0),
        attention_scale=hf_config.get_float(config, "attention_multiplier", 1.0),
        residual_scale=hf_config.get_float(config, "residual_multiplier", 1.0),
        logits_scale=1 / hf_config.get_float(config, "logits_scaling", 1.0),
        **fields,
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """From a GGUF file's key-values; its logit scale is a divisor, and a scale of 0 is
    none."""
    keys = GgufKeys(metadata, "granite")
    scales = {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}
    keys.refuse_unread(DECODER_KEYS | scales)
    fields = gguf_config.decoder_fields(keys, tensors)
    rope = rope_from_gguf(metadata, "granite", fields["head_dim"], tensors)
    return DecoderConfig(
        layers=(LayerConfig(rope, keys.get_int("feed_forward_length")),),
        embedding_scale=keys.get_scale("embedding_scale"),
        attention_scale=keys.get_scale("attention.scale", 0.0) or None,
        residual_scale=keys.get_scale("residual_scale"),
        logits_scale=1 / keys.get_scale("logit_scale"),
        **fields,
    )


GRANITE = Family(
    name="granite",
    models="Granite 3",
    build=Decoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
