"""Mixtral: Mistral's structure with experts in every layer (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import HF_IGNORED, HF_ROWS
from jaxinfer.models.experts import mixed_layers, num_experts
from jaxinfer.models.family import LINEAR, Family, Weight, WeightTable
from jaxinfer.models.rope_config import rope_from_hf
from jaxinfer.nn.experts import ExpertsConfig, RouterConfig

# The defaults of `MixtralConfig`.
DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_PATH, _NAME = r"blocks\.(\d+)\.mlp\.", r"model.layers.\1.block_sparse_moe."
HF_WEIGHTS = WeightTable(
    (
        Weight(_PATH + "router", _NAME + "gate.weight", LINEAR),
        Weight(_PATH + "gate", _NAME + "experts.{}.w1.weight", LINEAR),
        Weight(_PATH + "up", _NAME + "experts.{}.w3.weight", LINEAR),
        Weight(_PATH + "down", _NAME + "experts.{}.w2.weight", LINEAR),
        *HF_ROWS,
    ),
    HF_IGNORED,
)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take `MixtralConfig`'s defaults, except for sizes."""
    config = DEFAULTS | dict(config)
    ffn_dim, per_token = hf_config.require_ints(config, "intermediate_size", "num_experts_per_tok")
    fields = hf_config.decoder_fields(config)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"], theta=1e6)
    windows = hf_config.layer_windows(config, fields["num_layers"], config.get("sliding_window"))
    router = RouterConfig(num_experts(config), per_token, renormalize=True)
    experts = ExpertsConfig(router, ffn_dim, fields["activation"])
    layers = [LayerConfig(rope, ffn_dim, window) for window in windows]
    return DecoderConfig(layers=mixed_layers(layers, experts, [True] * len(layers)), **fields)


# Its GGUF files have the architecture llama (`models/llama.py`).
MIXTRAL = Family(
    name="mixtral",
    models="Mixtral 8x7B, 8x22B",
    build=Decoder,
    config_from_hf=config_from_hf,
    hf_weights=lambda config: HF_WEIGHTS,
)
