"""Mistral and Ministral: Llama's structure with a sliding window, in all layers or in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import HF_IGNORED, HF_IMAGES, HF_ROWS, HF_WRAPPED
from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.rope_config import rope_from_hf

# The defaults of `MistralConfig`. A null `sliding_window` means none; a missing one does not.
DEFAULTS = {
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
}
HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
WRAPPED_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED + HF_IMAGES, HF_WRAPPED)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json. With `layer_types` transformers calls the model a Ministral; here both are
    one family."""
    config = DEFAULTS | dict(config)
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = hf_config.decoder_fields(config)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    windows = hf_config.layer_windows(config, fields["num_layers"], config["sliding_window"])
    layers = tuple(LayerConfig(rope, ffn_dim, window) for window in windows)
    return DecoderConfig(layers=layers, **fields)


def config_from_wrapped(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read the text model of a Mistral with images: `text_config` in config.json."""
    text = hf_config.get_object(config, "text_config")
    kind = text.get("model_type", "mistral")
    if kind not in ("mistral", "ministral"):
        raise ValueError(f"text_config's model_type is {kind!r}; it must be mistral or ministral")
    return config_from_hf(text, tensors)


MISTRAL = Family(
    name="mistral",
    models="Mistral 7B, NeMo, Small; Ministral 8B",
    build=Decoder,
    config_from_hf=config_from_hf,
    hf_weights=lambda config: HF_WEIGHTS,
)
MISTRAL_WITH_IMAGES = Family(
    name="mistral3",
    models="Mistral Small 3.1 and later (text)",
    build=Decoder,
    config_from_hf=config_from_wrapped,
    hf_weights=lambda config: WRAPPED_WEIGHTS,
)
