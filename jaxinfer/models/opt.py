"""OPT: GPT-2's structure, with positions that begin at the table's third row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.family import Family, WeightTable
from jaxinfer.models.gpt import GptConfig, GptDecoder
from jaxinfer.models.gpt_weights import BLOCK, names_outside_module, rows
from jaxinfer.models.hf_config import get_activation, get_int, refuse_unsupported

FIRST_POSITION = 2


def hf_weights(config: GptConfig) -> WeightTable:
    block = r"model.decoder.layers.\1."
    return WeightTable(
        rows(
            {
                **{
                    rf"{BLOCK}attention\.{letter}": f"{block}self_attn.{letter}_proj"
                    for letter in "qkv"
                },
                rf"{BLOCK}attention\.o": f"{block}self_attn.out_proj",
                rf"{BLOCK}mlp\.up": f"{block}fc1",
                rf"{BLOCK}mlp\.down": f"{block}fc2",
                "head": "lm_head",
            },
            {
                rf"{BLOCK}attention_norm": f"{block}self_attn_layer_norm",
                rf"{BLOCK}mlp_norm": f"{block}final_layer_norm",
                "norm": "model.decoder.final_layer_norm",
            },
            {
                r"embed\.weight": "model.decoder.embed_tokens.weight",
                "positions": "model.decoder.embed_positions.weight",
            },
        ),
        ignored=(r"lm_head\.weight",),  # some tied files store it
        renamed=names_outside_module("model", "decoder"),
    )


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> GptConfig:
    """Read config.json; missing keys take `OPTConfig`'s defaults.

    Post-norms and narrower embeddings (both in OPT-350M) and models without biases (Galactica) are
    refused.
    """
    model_dim = get_int(config, "hidden_size", default=768)
    refuse_unsupported(
        config,
        do_layer_norm_before=True,
        word_embed_proj_dim=model_dim,
        enable_bias=True,
        layer_norm_elementwise_affine=True,
        _remove_final_layer_norm=False,
    )
    return GptConfig(
        vocab_size=get_int(config, "vocab_size", default=50272),
        num_layers=get_int(config, "num_hidden_layers", default=12),
        model_dim=model_dim,
        num_heads=get_int(config, "num_attention_heads", default=12),
        ffn_dim=get_int(config, "ffn_dim", default=3072),
        max_len=get_int(config, "max_position_embeddings", default=2048),
        activation=get_activation(config, "activation_function", default="relu"),
        has_position_table=True,
        first_position=FIRST_POSITION,
        is_tied=bool(config.get("tie_word_embeddings", True)),
    )


OPT = Family(
    name="opt",
    models="OPT",
    build=GptDecoder,
    config_from_hf=config_from_hf,
    hf_weights=hf_weights,
)
