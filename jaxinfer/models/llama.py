"""Llama 1 to 3.3, SmolLM 2 and other models with `LlamaForCausalLM`'s structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_IGNORED, GGUF_ROWS, HF_IGNORED, HF_ROWS
from jaxinfer.models.experts import EXPERT_KEYS, GGUF_EXPERTS_ROWS, layers_from_gguf
from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf

HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
GGUF_WEIGHTS = WeightTable((*GGUF_EXPERTS_ROWS, *GGUF_ROWS), GGUF_IGNORED)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take `LlamaConfig`'s defaults, if it has any."""
    return DecoderConfig(**fields_from_hf(config))


def fields_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Llama's `DecoderConfig`, which families based on Llama extend."""
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = hf_config.decoder_fields(config)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    has_bias = bool(config.get("attention_bias", False))
    return fields | {
        "layers": (LayerConfig(rope, ffn_dim),),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values. A file with experts is a Mixtral.

    Whether there are biases, and whether the head is tied, follows from the tensor names.
    """
    keys = GgufKeys(metadata, "llama")
    keys.refuse_unread(EXPERT_KEYS)
    fields = gguf_config.decoder_fields(keys, tensors)
    rope = rope_from_gguf(metadata, "llama", fields["head_dim"], tensors)
    ffn_dim = keys.get_int("feed_forward_length")
    if not keys.get("expert_count", 0):
        return DecoderConfig(layers=(LayerConfig(rope, ffn_dim),), **fields)
    layers = layers_from_gguf(keys, tensors, rope, renormalize=True, default_ffn_dim=ffn_dim)
    return DecoderConfig(layers=layers, **fields)


LLAMA = Family(
    name="llama",
    models="Llama 1, 2, 3, 3.1 to 3.3; SmolLM 2; Mixtral as GGUF",
    build=Decoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
