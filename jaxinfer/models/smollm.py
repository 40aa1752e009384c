"""SmolLM 3: Llama's structure, with some layers without positional encoding (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_IGNORED, GGUF_ROWS, HF_IGNORED, HF_ROWS
from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf

# The defaults of `SmolLM3Config`.
DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
GGUF_NOPE_INTERVAL = 4  # the files do not state it
HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
GGUF_WEIGHTS = WeightTable(GGUF_ROWS, GGUF_IGNORED)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json. With `use_sliding_window` the NoPE layers have a window."""
    config = DEFAULTS | dict(config)
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = hf_config.decoder_fields(config)
    num_layers = fields["num_layers"]
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"], theta=2_000_000.0)
    has_rope = hf_config.get_list(config, "no_rope_layers", int)  # 1: the layer has RoPE
    if has_rope is None:
        interval = hf_config.get_int(config, "no_rope_layer_interval", default=4)
        has_rope = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(has_rope) < num_layers:
        raise ValueError(f"no_rope_layers has {len(has_rope)} entries for {num_layers} layers")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    windows = hf_config.layer_windows(config, num_layers, window, lambda i: not has_rope[i])
    has_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        layers=tuple(
            LayerConfig(rope if layer_has_rope else None, ffn_dim, window)
            for layer_has_rope, window in zip(has_rope, windows, strict=False)
        ),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        **fields,
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values; every fourth layer has no positional encoding."""
    keys = GgufKeys(metadata, "smollm3")
    keys.refuse_unread(DECODER_KEYS)
    fields = gguf_config.decoder_fields(keys, tensors)
    rope = rope_from_gguf(metadata, "smollm3", fields["head_dim"], tensors)
    with_rope = LayerConfig(rope, keys.get_int("feed_forward_length"))
    nope = LayerConfig(None, with_rope.ffn_dim)
    return DecoderConfig(layers=(with_rope,) * (GGUF_NOPE_INTERVAL - 1) + (nope,), **fields)


SMOLLM3 = Family(
    name="smollm3",
    models="SmolLM 3",
    build=Decoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
