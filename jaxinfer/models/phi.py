"""Phi 3, 3.5, 4 and 4-mini: q, k and v in one tensor, gate and up in another, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_IGNORED, GGUF_ROWS, HF_IGNORED, HF_ROWS
from jaxinfer.models.family import LINEAR, LINEAR_JOINED, Family, Weight, WeightTable, fused_part
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf

# The defaults of `Phi3Config`.
DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LONGROPE_ALIASES = ("su", "yarn")


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json. The RoPE scalings named "su" and "yarn" are LongRoPE."""
    config = DEFAULTS | dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        given = hf_config.get_object(config, key)
        if given.get("rope_type", given.get("type")) in LONGROPE_ALIASES:
            config[key] = {**given, "rope_type": "longrope"}
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = hf_config.decoder_fields(config)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    layer = LayerConfig(rope, ffn_dim, config.get("sliding_window"))
    return DecoderConfig(layers=(layer,), **fields)


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values; a window of 0 means no window."""
    keys = GgufKeys(metadata, "phi3")
    keys.refuse_unread(DECODER_KEYS | {"attention.sliding_window"})
    fields = gguf_config.decoder_fields(keys, tensors)
    rope = rope_from_gguf(metadata, "phi3", fields["head_dim"], tensors)
    window = keys.get("attention.sliding_window") or None
    layer = LayerConfig(rope, keys.get_int("feed_forward_length"), window)
    return DecoderConfig(layers=(layer,), **fields)


def _fused(config: DecoderConfig, qkv: str, gate_up: str) -> tuple[Weight, ...]:
    """Return the rows of the two fused tensors: q, k, v; gate, up."""
    num_q, num_kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    starts = {"q": 0, "k": num_q, "v": num_q + num_kv}
    rows = [
        Weight(
            rf"blocks\.(\d+)\.attention\.{name}\.weight",
            qkv,
            fused_part(LINEAR, start, num_q + 2 * num_kv),
        )
        for name, start in starts.items()
    ]
    return (*rows, Weight(r"blocks\.(\d+)\.mlp\.gate_up", gate_up, LINEAR_JOINED))


def hf_weights(config: DecoderConfig) -> WeightTable:
    layer = r"model.layers.\1"
    fused = _fused(config, f"{layer}.self_attn.qkv_proj.weight", f"{layer}.mlp.gate_up_proj.weight")
    return WeightTable(fused + HF_ROWS, HF_IGNORED)


def gguf_weights(config: DecoderConfig) -> WeightTable:
    fused = _fused(config, r"blk.\1.attn_qkv.weight", r"blk.\1.ffn_up.weight")
    factors = (r"rope_factors_(long|short)\.weight",)  # part of the configuration
    return WeightTable(fused + GGUF_ROWS, GGUF_IGNORED + factors)


PHI3 = Family(
    name="phi3",
    models="Phi 3, 3.5 (mini, medium), 4, 4-mini",
    build=Decoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=hf_weights,
    gguf_weights=gguf_weights,
    restarts_at_limit=True,
)
