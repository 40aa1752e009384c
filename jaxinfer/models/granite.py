"""Granite 3: Llama's structure with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_IGNORED, GGUF_ROWS, HF_IGNORED, HF_ROWS
from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys
from jaxinfer.models.llama import fields_from_hf
from jaxinfer.models.rope_config import rope_from_gguf

HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
GGUF_WEIGHTS = WeightTable(GGUF_ROWS, GGUF_IGNORED)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json."""
    return DecoderConfig(
        embedding_scale=hf_config.get_float(config, "embedding_multiplier", 1.0),
        attention_scale=hf_config.get_float(config, "attention_multiplier", 1.0),
        residual_scale=hf_config.get_float(config, "residual_multiplier", 1.0),
        logits_scale=1 / hf_config.get_float(config, "logits_scaling", 1.0),
        **fields_from_hf(config),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values. Its logit scale is a divisor; a scale of 0 means none."""
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
