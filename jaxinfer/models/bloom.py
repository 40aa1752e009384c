"""BLOOM and BLOOMZ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gguf_config import GgufKeys
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
from jaxinfer.models.hf_config import get_float, get_int, refuse_unsupported

TRAINED_LEN = 2048  # for a config.json without seq_length; ALiBi itself has no limit


def hf_weights(config: GptConfig) -> WeightTable:
    """Return the weight table; the fused tensor stores q, k and v of one head after another."""
    block = r"transformer.h.\1."
    return WeightTable(
        fused_qkv_rows(f"{block}self_attention.query_key_value", interleaved)
        + rows(
            {
                rf"{BLOCK}attention\.o": f"{block}self_attention.dense",
                rf"{BLOCK}mlp\.up": f"{block}mlp.dense_h_to_4h",
                rf"{BLOCK}mlp\.down": f"{block}mlp.dense_4h_to_h",
                "head": "lm_head",
            },
            {
                r"blocks\.0\.embedding_norm": "transformer.word_embeddings_layernorm",
                rf"{BLOCK}attention_norm": f"{block}input_layernorm",
                rf"{BLOCK}mlp_norm": f"{block}post_attention_layernorm",
                "norm": "transformer.ln_f",
            },
            {r"embed\.weight": "transformer.word_embeddings.weight"},
        ),
        ignored=(r"lm_head\.weight",),  # some tied files store it
        renamed=names_outside_module(
            "transformer", "h", "word_embeddings", "word_embeddings_layernorm", "ln_f"
        ),
    )


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> GptConfig:
    """Read config.json; missing keys take `BloomConfig`'s defaults, if it has sensible ones.

    `max_len` is the `seq_length` of its training. Longer contexts are possible, since scores depend
    only on distances.
    """
    model_dim = get_int(config, "n_embed", "hidden_size")
    # In transformers `slow_but_exact` omits two biases; no published model sets it.
    refuse_unsupported(config, slow_but_exact=False, n_inner=4 * model_dim)
    normed = config.get("apply_residual_connection_post_layernorm", False)
    return GptConfig(
        vocab_size=get_int(config, "vocab_size", default=250880),
        num_layers=get_int(config, "n_layer", "num_hidden_layers"),
        model_dim=model_dim,
        num_heads=get_int(config, "n_head", "num_attention_heads"),
        ffn_dim=4 * model_dim,
        max_len=get_int(config, "seq_length", default=TRAINED_LEN),
        norm_eps=get_float(config, "layer_norm_epsilon", 1e-5),
        residual="normed" if normed else "sequential",
        has_alibi=True,
        has_embedding_norm=True,
        is_tied=bool(config.get("tie_word_embeddings", True)),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> GptConfig:
    """Read a GGUF file's key-values. They cannot express `residual`; no model is converted with
    another value than the default."""
    keys = GgufKeys(metadata, "bloom")
    keys.refuse_unread(GGUF_KEYS)
    return GptConfig(
        max_len=keys.get_int("context_length"),
        has_alibi=True,
        has_embedding_norm=True,
        **gguf_fields(keys, tensors),
    )


BLOOM = Family(
    name="bloom",
    models="BLOOM, BLOOMZ",
    build=GptDecoder,
    config_from_hf=config_from_hf,
    hf_weights=hf_weights,
    config_from_gguf=config_from_gguf,
    gguf_weights=gguf_weights,
)
