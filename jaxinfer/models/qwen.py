"""Qwen 2 and 2.5 (biases of q, k and v) and Qwen 3 (norms of each head's q and k)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_HALVES_ROWS, GGUF_IGNORED, HF_IGNORED, HF_ROWS
from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf

# The defaults of `Qwen2Config` and `Qwen3Config`.
DEFAULTS = {"max_position_embeddings": 32_768, "num_key_value_heads": 32}
HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
GGUF_WEIGHTS = WeightTable(GGUF_HALVES_ROWS, GGUF_IGNORED)


def _layers_from_hf(
    config: Mapping[str, Any], fields: Mapping[str, Any], ffn_dim: int
) -> tuple[LayerConfig, ...]:
    """Return the layers, with MLPs of width `ffn_dim`. With `use_sliding_window` the layers from
    `max_window_layers` on have a window."""
    hf_config.refuse_unsupported(config, dual_chunk_attention_config=None)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = lambda: hf_config.get_int(config, "max_window_layers", default=28, least=0)
    windows = hf_config.layer_windows(
        config, fields["num_layers"], window, lambda layer: layer >= first()
    )
    return tuple(LayerConfig(rope, ffn_dim, window) for window in windows)


def qwen2_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take `Qwen2Config`'s defaults."""
    config = DEFAULTS | dict(config)
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = hf_config.decoder_fields(config)
    return DecoderConfig(layers=_layers_from_hf(config, fields, ffn_dim), qkv_bias=True, **fields)


def qwen3_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take `Qwen3Config`'s defaults."""
    config = DEFAULTS | {"head_dim": 128} | dict(config)
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = hf_config.decoder_fields(config)
    has_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        layers=_layers_from_hf(config, fields, ffn_dim),
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        **fields,
    )


def qwen2_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values. They have no window, since no published model uses one."""
    return _from_gguf(GgufKeys(metadata, "qwen2"), tensors)


def qwen3_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values."""
    return _from_gguf(GgufKeys(metadata, "qwen3"), tensors, qk_norm="head")


def _from_gguf(keys: GgufKeys, tensors: Mapping[str, Any], **qk_norm_fields: Any) -> DecoderConfig:
    keys.refuse_unread(DECODER_KEYS)
    fields = gguf_config.decoder_fields(keys, tensors) | qk_norm_fields
    rope = rope_from_gguf(keys.metadata, keys.architecture, fields["head_dim"], tensors)
    return DecoderConfig(layers=(LayerConfig(rope, keys.get_int("feed_forward_length")),), **fields)


QWEN2 = Family(
    name="qwen2",
    models="Qwen 2, 2.5",
    build=Decoder,
    config_from_hf=qwen2_from_hf,
    config_from_gguf=qwen2_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
QWEN3 = Family(
    name="qwen3",
    models="Qwen 3",
    build=Decoder,
    config_from_hf=qwen3_from_hf,
    config_from_gguf=qwen3_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
