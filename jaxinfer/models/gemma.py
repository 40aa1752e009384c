"""Gemma 1, 2 and 3: scaled embeddings, norms that multiply by 1 + weight, a tied head.

Gemma 2 has norms before and after attention and MLP, soft caps, and a window in every second layer.
Gemma 3 has norms of q and k in place of the soft cap of scores, a window in five layers of six, and
two RoPEs: the sliding layers have another theta, and no scaling. Of a Gemma 3 with images only the
text model is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import (
    GGUF_HALVES_ROWS,
    GGUF_IGNORED,
    HF_IGNORED,
    HF_IMAGES,
    HF_ROWS,
    HF_WRAPPED,
)
from jaxinfer.models.family import Family, Weight, WeightTable
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf, ropes_from_hf
from jaxinfer.nn.rope import Rope

GELU = "gelu_pytorch_tanh"
# The defaults of the configuration classes. The config.json of a Gemma 3 has few keys.
DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 4,
    "hidden_activation": GELU,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS = DEFAULTS | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "hidden_activation": GELU,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # Gemma 3's
# The GGUF files have no key for the scale of scores. Only the largest models, recognized by their
# number of layers, scale by model_dim / num_heads rather than by the head's dimension.
NUM_LAYERS_27B = {"gemma2": 46, "gemma3": 62}

_PRE_NORM = Weight(
    r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.pre_feedforward_layernorm.weight"
)
HF_WEIGHTS = WeightTable(HF_ROWS, HF_IGNORED)
HF_WEIGHTS_WITH_POST_NORMS = WeightTable((_PRE_NORM, *HF_ROWS), HF_IGNORED + HF_IMAGES, HF_WRAPPED)
GGUF_WEIGHTS = WeightTable(GGUF_HALVES_ROWS, GGUF_IGNORED)


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that all three generations share, except the layers."""
    hf_config.refuse_unsupported(config, use_bidirectional_attention=False)
    has_bias = bool(config.get("attention_bias", False))
    fields = hf_config.decoder_fields(config)
    return fields | {
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(fields["model_dim"]),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
    }


def gemma_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json.

    A `hidden_act` of "gelu" means the tanh approximation, as in the reference, because the first
    published files state it for models that were trained with the approximation.
    `hidden_activation` takes precedence, and can select the exact GELU.
    """
    config = DEFAULTS | dict(config)
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = _fields(config | {"hidden_act": config.get("hidden_activation") or GELU})
    if config.get("hidden_activation") is None and config.get("hidden_act") not in (None, "gelu"):
        fields["activation"] = hf_config.get_activation(config, "hidden_act")
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    return DecoderConfig(layers=(LayerConfig(rope, ffn_dim),), **fields)


def gemma2_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json."""
    config = GEMMA2_DEFAULTS | dict(config)
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    fields = _fields({k: v for k, v in config.items() if k != "hidden_act"})
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    windows = hf_config.layer_windows(
        config, fields["num_layers"], config["sliding_window"], lambda i: i % 2 == 0
    )
    return DecoderConfig(
        layers=tuple(LayerConfig(rope, ffn_dim, window) for window in windows),
        norms="around",
        attention_scale=hf_config.get_float(config, "query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=config["attn_logit_softcapping"],
        logits_soft_cap=config["final_logit_softcapping"],
        **fields,
    )


def gemma3_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read the config.json of a text model, or the `text_config` of one with images."""
    if "text_config" in config:
        config = hf_config.get_object(config, "text_config")
        # The reference omits it in models with images; no published model sets it.
        hf_config.refuse_unsupported(config, final_logit_softcapping=None)
    config = GEMMA3_DEFAULTS | dict(config)
    hf_config.refuse_unsupported(config, attn_logit_softcapping=None)
    fields = _fields({k: v for k, v in config.items() if k != "hidden_act"})
    full, sliding = ropes_from_hf(
        config,
        fields["head_dim"],
        fields["max_len"],
        theta=GLOBAL_THETA,
        local_theta=hf_config.get_float(config, "rope_local_base_freq", LOCAL_THETA),
    )
    every = hf_config.get_int(config, "sliding_window_pattern", default=6)
    windows = hf_config.layer_windows(
        config, fields["num_layers"], config["sliding_window"], lambda i: (i + 1) % every != 0
    )
    [ffn_dim] = hf_config.require_ints(config, "intermediate_size")
    layers = [LayerConfig(sliding if window else full, ffn_dim, window) for window in windows]
    return DecoderConfig(
        layers=tuple(layers),
        norms="around",
        qk_norm="head",
        attention_scale=hf_config.get_float(config, "query_pre_attn_scalar") ** -0.5,
        logits_soft_cap=config.get("final_logit_softcapping"),
        **fields,
    )


def _gguf_fields(keys: GgufKeys, tensors: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
    """Return the fields that all three share, except the layers.

    The converter adds 1 to the norms' weights, so there is no `norm_offset`.
    """
    keys.refuse_unread(DECODER_KEYS | read)
    fields = gguf_config.decoder_fields(keys, tensors)
    fields |= {"activation": GELU, "embedding_scale": math.sqrt(fields["model_dim"])}
    if fields["num_layers"] == NUM_LAYERS_27B.get(keys.architecture):
        fields["attention_scale"] = (fields["model_dim"] // fields["num_heads"]) ** -0.5
    return fields


def gemma_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values."""
    keys = GgufKeys(metadata, "gemma")
    fields = _gguf_fields(keys, tensors, set())
    rope = rope_from_gguf(metadata, "gemma", fields["head_dim"], tensors)
    return DecoderConfig(layers=(LayerConfig(rope, keys.get_int("feed_forward_length")),), **fields)


def gemma2_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values. The oldest files lack the window and the caps, which are the
    same in all published models."""
    keys = GgufKeys(metadata, "gemma2")
    caps = {"attn_logit_softcapping", "final_logit_softcapping"}
    fields = _gguf_fields(keys, tensors, caps | {"attention.sliding_window"})
    rope = rope_from_gguf(metadata, "gemma2", fields["head_dim"], tensors)
    ffn_dim = keys.get_int("feed_forward_length")
    window = keys.get_int("attention.sliding_window", 4096)
    return DecoderConfig(
        layers=(LayerConfig(rope, ffn_dim, window), LayerConfig(rope, ffn_dim)),
        norms="around",
        attention_soft_cap=keys.get("attn_logit_softcapping", 50.0),
        logits_soft_cap=keys.get("final_logit_softcapping", 30.0),
        **fields,
    )


def gemma3_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values; five layers of six are sliding."""
    keys = GgufKeys(metadata, "gemma3")
    read = {"attention.sliding_window", "rope.freq_base_swa", "final_logit_softcapping"}
    fields = _gguf_fields(keys, tensors, read)
    full = rope_from_gguf(metadata, "gemma3", fields["head_dim"], tensors)
    ffn_dim = keys.get_int("feed_forward_length")
    layers = (LayerConfig(full, ffn_dim),)
    if keys.get("attention.sliding_window"):
        local = Rope(keys.get_float("rope.freq_base_swa", LOCAL_THETA), full.dim)
        layers = (
            LayerConfig(local, ffn_dim, keys.get_int("attention.sliding_window")),
        ) * 5 + layers
    return DecoderConfig(
        layers=layers,
        norms="around",
        qk_norm="head",
        logits_soft_cap=keys.get("final_logit_softcapping"),
        **fields,
    )


GEMMA = Family(
    name="gemma",
    models="Gemma 1",
    build=Decoder,
    config_from_hf=gemma_from_hf,
    config_from_gguf=gemma_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
GEMMA2 = Family(
    name="gemma2",
    models="Gemma 2",
    build=Decoder,
    config_from_hf=gemma2_from_hf,
    config_from_gguf=gemma2_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS_WITH_POST_NORMS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
GEMMA3 = Family(
    name="gemma3",
    models="Gemma 3 (text)",
    build=Decoder,
    config_from_hf=gemma3_from_hf,
    config_from_gguf=gemma3_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS_WITH_POST_NORMS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
