"""Qwen 2 and Qwen 3 with experts in place of the MLP, in all layers or in some.

Qwen2-MoE adds a shared expert with a gate, and has biases of q, k and v. Qwen3-MoE has norms of q
and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import gguf_config, hf_config
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.decoder_weights import GGUF_HALVES_ROWS, GGUF_IGNORED, HF_IGNORED, HF_ROWS
from jaxinfer.models.experts import (
    EXPERT_KEYS,
    GGUF_EXPERTS_ROWS,
    HF_EXPERTS_ROWS,
    hf_shared_rows,
    layers_from_gguf,
    mixed_layers,
    num_experts,
)
from jaxinfer.models.family import LINEAR, Family, Weight, WeightTable
from jaxinfer.models.gguf_config import GgufKeys
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf
from jaxinfer.nn.experts import ExpertsConfig, RouterConfig

# The defaults of `Qwen2MoeConfig` and `Qwen3MoeConfig`.
DEFAULTS = {"max_position_embeddings": 32_768, "num_experts_per_tok": 4, "sliding_window": 4096}
HF_WEIGHTS = WeightTable(
    (
        *HF_EXPERTS_ROWS,
        *hf_shared_rows("shared_expert"),
        Weight(
            r"blocks\.(\d+)\.mlp\.shared_gate",
            r"model.layers.\1.mlp.shared_expert_gate.weight",
            LINEAR,
        ),
        *HF_ROWS,
    ),
    HF_IGNORED,
)
GGUF_WEIGHTS = WeightTable((*GGUF_EXPERTS_ROWS, *GGUF_HALVES_ROWS), GGUF_IGNORED)


def qwen2_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take `Qwen2MoeConfig`'s defaults, except for sizes.

    With `use_sliding_window` every other layer below `max_window_layers` has a window.
    """
    config = DEFAULTS | {"num_key_value_heads": 16} | dict(config)
    [shared_dim] = hf_config.require_ints(config, "shared_expert_intermediate_size")
    fields = hf_config.decoder_fields(config)
    first_without = lambda: hf_config.get_int(config, "max_window_layers", default=28, least=0)
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    windows = hf_config.layer_windows(
        config, fields["num_layers"], window, lambda i: i % 2 == 0 and i < first_without()
    )
    layers = _layers(config, fields, windows, shared_ffn_dim=shared_dim, has_shared_gate=True)
    return DecoderConfig(layers=layers, qkv_bias=bool(config.get("qkv_bias", True)), **fields)


def qwen3_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json; missing keys take `Qwen3MoeConfig`'s defaults, except for sizes.

    With `use_sliding_window` all layers have a window.
    """
    config = DEFAULTS | {"num_experts_per_tok": 8, "num_key_value_heads": 4} | dict(config)
    fields = hf_config.decoder_fields(config)
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    windows = hf_config.layer_windows(config, fields["num_layers"], window)
    has_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        layers=_layers(config, fields, windows),
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        **fields,
    )


def _layers(config, fields, windows, **shared: Any) -> tuple[LayerConfig, ...]:
    """Return the layers. Every `decoder_sparse_step`-th layer has experts, except those that
    `mlp_only_layers` lists."""
    hf_config.refuse_unsupported(config, dual_chunk_attention_config=None)
    names = ("intermediate_size", "moe_intermediate_size", "num_experts_per_tok")
    ffn_dim, experts_dim, per_token = hf_config.require_ints(config, *names)
    rope = rope_from_hf(config, fields["head_dim"], fields["max_len"])
    router = RouterConfig(
        num_experts(config), per_token, renormalize=bool(config.get("norm_topk_prob", False))
    )
    experts = ExpertsConfig(router, experts_dim, fields["activation"], **shared)
    step = hf_config.get_int(config, "decoder_sparse_step", default=1)
    dense = set(hf_config.get_list(config, "mlp_only_layers", int) or ())
    is_mixture = [(i + 1) % step == 0 and i not in dense for i in range(fields["num_layers"])]
    layers = [LayerConfig(rope, ffn_dim, window) for window in windows]
    return mixed_layers(layers, experts, is_mixture)


def qwen2_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values. They have no window, since no published model uses one."""
    keys = GgufKeys(metadata, "qwen2moe")
    shared_dim = keys.get_int(
        "expert_shared_feed_forward_length", keys.get_int("feed_forward_length")
    )
    return _from_gguf(
        keys, tensors, renormalize=False, shared_ffn_dim=shared_dim, has_shared_gate=True
    )


def qwen3_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """Read a GGUF file's key-values."""
    return _from_gguf(GgufKeys(metadata, "qwen3moe"), tensors, renormalize=True, qk_norm="head")


def _from_gguf(
    keys: GgufKeys,
    tensors: Mapping[str, Any],
    *,
    renormalize: bool,
    qk_norm: Any = None,
    **shared: Any,
) -> DecoderConfig:
    keys.refuse_unread(EXPERT_KEYS)
    fields = gguf_config.decoder_fields(keys, tensors)
    rope = rope_from_gguf(keys.metadata, keys.architecture, fields["head_dim"], tensors)
    layers = layers_from_gguf(keys, tensors, rope, renormalize=renormalize, **shared)
    return DecoderConfig(layers=layers, qk_norm=qk_norm, **fields)


QWEN2_MOE = Family(
    name="qwen2_moe",
    models="Qwen 1.5 and 2 MoE",
    build=Decoder,
    config_from_hf=qwen2_from_hf,
    config_from_gguf=qwen2_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    models="Qwen 3 MoE",
    build=Decoder,
    config_from_hf=qwen3_from_hf,
    config_from_gguf=qwen3_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
