"""Llama 1 to 3.3, SmolLM 2 and everything else with `LlamaForCausalLM`'s structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.models.decoder import Decoder, DecoderConfig, LayerConfig
from jaxinfer.models.family import (
    BIAS_PAIRED,
    LINEAR,
    LINEAR_FROM_HEADS,
    LINEAR_PAIRED,
    RESHAPED,
    Family,
    Weight,
    WeightTable,
)
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf

HF_WEIGHTS = WeightTable(
    (
        Weight(r"embed\.weight", "model.embed_tokens.weight"),
        Weight(r"norm\.weight", "model.norm.weight"),
        Weight(r"head\.weight", "lm_head.weight", LINEAR),
        Weight(r"blocks\.(\d+)\.attention_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
        Weight(
            r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"
        ),
        Weight(
            r"blocks\.(\d+)\.attention\.([qkv])\.weight",
            r"model.layers.\1.self_attn.\2_proj.weight",
            LINEAR,
        ),
        Weight(
            r"blocks\.(\d+)\.attention\.([qkv])\.bias",
            r"model.layers.\1.self_attn.\2_proj.bias",
            RESHAPED,
        ),
        Weight(
            r"blocks\.(\d+)\.attention\.o\.weight",
            r"model.layers.\1.self_attn.o_proj.weight",
            LINEAR_FROM_HEADS,
        ),
        Weight(r"blocks\.(\d+)\.attention\.o\.bias", r"model.layers.\1.self_attn.o_proj.bias"),
        Weight(
            r"blocks\.(\d+)\.mlp\.gate_up",
            (r"model.layers.\1.mlp.gate_proj.weight", r"model.layers.\1.mlp.up_proj.weight"),
            LINEAR,
        ),
        Weight(
            r"blocks\.(\d+)\.mlp\.gate_up_bias",
            (r"model.layers.\1.mlp.gate_proj.bias", r"model.layers.\1.mlp.up_proj.bias"),
        ),
        Weight(
            r"blocks\.(\d+)\.mlp\.down\.weight", r"model.layers.\1.mlp.down_proj.weight", LINEAR
        ),
        Weight(r"blocks\.(\d+)\.mlp\.down\.bias", r"model.layers.\1.mlp.down_proj.bias"),
    ),
    # Old checkpoints carry the frequencies, tied ones sometimes the head; both are derived here.
    ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
)

GGUF_WEIGHTS = WeightTable(
    (
        Weight(r"embed\.weight", "token_embd.weight"),
        Weight(r"norm\.weight", "output_norm.weight"),
        Weight(r"head\.weight", "output.weight", LINEAR),
        Weight(r"blocks\.(\d+)\.attention_norm\.weight", r"blk.\1.attn_norm.weight"),
        Weight(r"blocks\.(\d+)\.mlp_norm\.weight", r"blk.\1.ffn_norm.weight"),
        Weight(
            r"blocks\.(\d+)\.attention\.([qk])\.weight", r"blk.\1.attn_\2.weight", LINEAR_PAIRED
        ),
        Weight(r"blocks\.(\d+)\.attention\.v\.weight", r"blk.\1.attn_v.weight", LINEAR),
        Weight(r"blocks\.(\d+)\.attention\.([qk])\.bias", r"blk.\1.attn_\2.bias", BIAS_PAIRED),
        Weight(r"blocks\.(\d+)\.attention\.v\.bias", r"blk.\1.attn_v.bias", RESHAPED),
        Weight(
            r"blocks\.(\d+)\.attention\.o\.weight", r"blk.\1.attn_output.weight", LINEAR_FROM_HEADS
        ),
        Weight(r"blocks\.(\d+)\.attention\.o\.bias", r"blk.\1.attn_output.bias"),
        Weight(
            r"blocks\.(\d+)\.mlp\.gate_up",
            (r"blk.\1.ffn_gate.weight", r"blk.\1.ffn_up.weight"),
            LINEAR,
        ),
        Weight(
            r"blocks\.(\d+)\.mlp\.gate_up_bias", (r"blk.\1.ffn_gate.bias", r"blk.\1.ffn_up.bias")
        ),
        Weight(r"blocks\.(\d+)\.mlp\.down\.weight", r"blk.\1.ffn_down.weight", LINEAR),
        Weight(r"blocks\.(\d+)\.mlp\.down\.bias", r"blk.\1.ffn_down.bias"),
    ),
    ignored=(r"rope_freqs\.weight",),
)


# What `config_from_gguf` and `rope_from_gguf` honour of the keys that can change the arithmetic.
GGUF_KEYS = frozenset(
    (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",  # says how the model was trained, not how it computes
    )
)


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """From config.json; missing keys take `LlamaConfig`'s defaults where it has any."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(
            f"quantization_config ({method!r}) is not supported yet; use the checkpoint before "
            "quantization, or a GGUF file"
        )
    missing = [
        key
        for key in (
            "vocab_size",
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
        )
        if not isinstance(config.get(key), int)
    ]
    if missing:
        raise ValueError(f"config.json lacks a whole number for {', '.join(missing)}")
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act is {activation!r}; this build has {', '.join(sorted(ACTIVATIONS))}"
        )
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // max(num_heads, 1)
    has_bias = bool(config.get("attention_bias", False))
    max_len = config.get("max_position_embeddings", 2048)
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        model_dim=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_len=max_len,
        layers=(LayerConfig(rope_from_hf(config, head_dim, max_len), config["intermediate_size"]),),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=activation,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """From a GGUF file's key-values; biases and the tied head are read off the tensor names."""

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if value is None:
            raise ValueError(f"the GGUF file has no llama.{name}")
        return value

    if key("expert_count", 0):
        raise ValueError(
            f"llama.expert_count is {key('expert_count')}: mixture-of-experts files are not "
            "supported; use a dense checkpoint"
        )
    unread = [
        name
        for name in metadata
        if name.startswith(("llama.attention.", "llama.rope."))
        and name.removeprefix("llama.") not in GGUF_KEYS
    ]
    if unread:
        raise ValueError(f"the GGUF file sets {', '.join(unread)}, which this build cannot honour")
    D, num_heads = key("embedding_length"), key("attention.head_count")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"llama.attention.head_count is {num_heads}; it must be a whole number")
    head_dim = key("attention.key_length", D // num_heads)
    if key("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"llama.attention.value_length {key('attention.value_length')} differs from the key's "
            f"length {head_dim}; the Llama family has one head dimension"
        )
    embedding = tensors.get("token_embd.weight")
    return DecoderConfig(
        vocab_size=embedding.shape[0] if embedding is not None else key("vocab_size"),
        num_layers=key("block_count"),
        model_dim=D,
        num_heads=num_heads,
        num_kv_heads=key("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_len=key("context_length"),
        layers=(
            LayerConfig(
                rope_from_gguf(metadata, "llama", head_dim, tensors), key("feed_forward_length")
            ),
        ),
        norm_eps=key("attention.layer_norm_rms_epsilon"),
        is_tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
    )


LLAMA = Family(
    name="llama",
    build=Decoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=lambda config: HF_WEIGHTS,
    gguf_weights=lambda config: GGUF_WEIGHTS,
)
