"""GPT-NeoX, Pythia and models with their structure: Dolly, RedPajama, StableLM alpha."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import GgufKeys, has_block_tensor
from jaxinfer.models.gpt import GptConfig, GptDecoder
from jaxinfer.models.gpt_weights import (
    BLOCK,
    GGUF_KEYS,
    fused_qkv_rows,
    gguf_fields,
    gguf_weights,
    interleaved,
    names_outside_module,
    rows,
)
from jaxinfer.models.hf_config import get_activation, get_float, get_int
from jaxinfer.models.rope_config import rope_from_gguf, rope_from_hf

SIZE_20B = (44, 6144)  # num_layers, model_dim
_GGUF_KEYS = GGUF_KEYS | {
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}


def hf_weights(config: GptConfig) -> WeightTable:
    """Return the weight table; the fused tensor stores q, k and v of one head after another."""
    block = r"gpt_neox.layers.\1."
    return WeightTable(
        fused_qkv_rows(f"{block}attention.query_key_value", interleaved)
        + rows(
            {
                rf"{BLOCK}attention\.o": f"{block}attention.dense",
                rf"{BLOCK}mlp\.up": f"{block}mlp.dense_h_to_4h",
                rf"{BLOCK}mlp\.down": f"{block}mlp.dense_4h_to_h",
                "head": "embed_out",
            },
            {
                rf"{BLOCK}attention_norm": f"{block}input_layernorm",
                rf"{BLOCK}mlp_norm": f"{block}post_attention_layernorm",
                "norm": "gpt_neox.final_layer_norm",
            },
            {r"embed\.weight": "gpt_neox.embed_in.weight"},
        ),
        # Old files store the causal mask and RoPE's frequencies, and tied ones sometimes the head.
        ignored=(
            r".*attention\.(masked_)?bias",
            r".*rotary_emb\.inv_freq",
            r"embed_out\.weight",
        ),
        renamed=names_outside_module("gpt_neox", "layers", "embed_in", "final_layer_norm"),
    )


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> GptConfig:
    """Read config.json; missing keys take `GPTNeoXConfig`'s defaults."""
    model_dim = get_int(config, "hidden_size", default=6144)
    num_heads = get_int(config, "num_attention_heads", default=64)
    max_len = get_int(config, "max_position_embeddings", default=2048)
    # The older names of theta and the rotated share, from before `rope_parameters`.
    older = {
        "rope_theta": config.get("rotary_emb_base", 10_000.0),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    return GptConfig(
        vocab_size=get_int(config, "vocab_size", default=50432),
        num_layers=get_int(config, "num_hidden_layers", default=44),
        model_dim=model_dim,
        num_heads=num_heads,
        ffn_dim=get_int(config, "intermediate_size", default=24576),
        max_len=max_len,
        activation=get_activation(config, "hidden_act", default="gelu"),
        norm_eps=get_float(config, "layer_norm_eps", 1e-5),
        residual="parallel" if config.get("use_parallel_residual", True) else "sequential",
        rope=rope_from_hf({**older, **config}, model_dim // num_heads, max_len),
        has_attention_bias=bool(config.get("attention_bias", True)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> GptConfig:
    """Read a GGUF file's key-values.

    They do not name the activation, which is the exact GELU in nearly all of these models.
    GPT-NeoX-20B, recognized by its size, was trained with the tanh approximation (its config.json
    has "gelu_fast").
    """
    keys = GgufKeys(metadata, "gptneox")
    keys.refuse_unread(_GGUF_KEYS)
    fields = gguf_fields(keys, tensors)
    head_dim = fields["model_dim"] // fields["num_heads"]
    is_20b = (fields["num_layers"], fields["model_dim"]) == SIZE_20B
    return GptConfig(
        max_len=keys.get_int("context_length"),
        activation="gelu_pytorch_tanh" if is_20b else "gelu",
        residual="parallel" if keys.get("use_parallel_residual", True) else "sequential",
        rope=rope_from_gguf(metadata, "gptneox", head_dim, tensors),
        has_attention_bias=has_block_tensor(tensors, "attn_qkv.bias"),
        **fields,
    )


GPT_NEOX = Family(
    name="gpt_neox",
    models="GPT-NeoX, Pythia, Dolly 2, RedPajama-INCITE, StableLM alpha",
    build=GptDecoder,
    config_from_hf=config_from_hf,
    hf_weights=hf_weights,
    config_from_gguf=config_from_gguf,
    gguf_weights=gguf_weights,
)
