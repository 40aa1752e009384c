"""OLMo 2 and OLMo 3.

OLMo 2 has norms only after attention and MLP, and norms over all heads of q and of k. OLMo 3 adds a
sliding window in three layers of four.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_HALVES_ROWS, GGUF_IGNORED, HF_IGNORED, HF_ROWS
from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf, ropes_from_hf
from jaxinfer.nn.rope import Rope

OLMO3_THETA = 500_000.0
NORMS: dict[str, Any] = {"norms": "after", "qk_norm": "all"}
HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
GGUF_WEIGHTS = WeightTable(GGUF_HALVES_ROWS, GGUF_IGNORED)


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields except the layers; missing keys take `Olmo2Config`'s defaults."""
    has_bias = bool(config.get("attention_bias", False))
    fields = hf_config.decoder_fields({"rms_norm_eps": 1e-5} | dict(config))
    return fields | NORMS | {"qkv_bias": has_bias, "out_bias": has_bias}


def olmo2_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json."""
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = _fields(config)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    return DecoderConfig(layers=(LayerConfig(rope, ffn_dim),), **fields)


def olmo3_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json. A RoPE scaling applies only to the full-attention layers."""
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = _fields(config)
    theta = OLMO3_THETA
    if config.get("rope_theta") is not None:
        theta = hf_config.get_float(config, "rope_theta")
    full, sliding = ropes_from_hf(
        config, fields["head_dim"], fields["max_len"], theta=theta, local_theta=theta
    )
    windows = hf_config.layer_windows(
        config, fields["num_layers"], config.get("sliding_window", 4096), lambda i: (i + 1) % 4 != 0
    )
    layers = [LayerConfig(sliding if window else full, ffn_dim, window) for window in windows]
    return DecoderConfig(layers=tuple(layers), **fields)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values. A file with a window is an OLMo 3, whose windows are those of
    `olmo3_from_hf`."""
    keys = GgufKeys(metadata, "olmo2")
    keys.refuse_unread(
        DECODER_KEYS | {"attention.sliding_window", "attention.sliding_window_pattern"}
    )
    fields = gguf_config.decoder_fields(keys, tensors) | NORMS
    full = rope_from_gguf(metadata, "olmo2", fields["head_dim"], tensors)
    ffn_dim, layers = keys.get_int("feed_forward_length"), None
    if keys.get("attention.sliding_window"):
        window = keys.get_int("attention.sliding_window")
        sliding = LayerConfig(Rope(full.theta, full.dim), ffn_dim, window)
        slides = keys.get("attention.sliding_window_pattern", [True, True, True, False])
        if not isinstance(slides, list | tuple):
            raise ValueError(
                f"olmo2.attention.sliding_window_pattern is {slides!r}; it must be a list"
            )
        layers = tuple(sliding if s else LayerConfig(full, ffn_dim) for s in slides)
    return DecoderConfig(layers=layers or (LayerConfig(full, ffn_dim),), **fields)


OLMO2 = Family(
    name="olmo2",
    models="OLMo 2",
    build=Decoder,
    config_from_hf=olmo2_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
OLMO3 = Family(
    name="olmo3",
    models="OLMo 3",
    build=Decoder,
    config_from_hf=olmo3_from_hf,
    hf_weights=lambda config: HF_WEIGHTS,
)
