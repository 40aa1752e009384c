"""GPT-2 and models with its structure: DistilGPT-2, DialoGPT, Cerebras-GPT, and GPT-3's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.family import (
    RESHAPED,
    Family,
    Shape,
    Transform,
    Weight,
    WeightTable,
    fused_part,
)
from jaxinfer.models.gguf_config import GgufKeys
from jaxinfer.models.gpt import GptConfig, GptDecoder
from jaxinfer.models.gpt_weights import (
    BLOCK,
    GGUF_KEYS,
    gguf_fields,
    gguf_weights,
    names_outside_module,
    rows,
)
from jaxinfer.models.hf_config import get_activation, get_float, get_int, refuse_unsupported


def _conv1d(index: int) -> Transform:
    """Return the transform to q, k or v (`index` 0, 1, 2) of a fused tensor [inputs, outputs]."""

    def stored_shape(shape: Shape) -> Shape:
        inputs, heads, head_dim = shape
        return (inputs, 3 * heads * head_dim)

    def apply(stored, shape):
        return stored.reshape(shape[0], 3, *shape[1:])[:, index]

    return Transform(stored_shape, apply)


_CONV1D_FROM_HEADS = Transform(
    lambda shape: (shape[0] * shape[1], shape[2]), lambda stored, shape: stored.reshape(shape)
)


def hf_weights(config: GptConfig) -> WeightTable:
    """Return the weight table; matrices are stored as [inputs, outputs]."""
    block, D = r"transformer.h.\1.", config.model_dim
    matrix_rows = [
        Weight(rf"{BLOCK}attention\.o\.weight", f"{block}attn.c_proj.weight", _CONV1D_FROM_HEADS),
        Weight(rf"{BLOCK}attention\.o\.bias", f"{block}attn.c_proj.bias"),
        Weight(rf"{BLOCK}mlp\.up\.(weight|bias)", rf"{block}mlp.c_fc.\2"),
        Weight(rf"{BLOCK}mlp\.down\.(weight|bias)", rf"{block}mlp.c_proj.\2"),
    ]
    for index, letter in enumerate("qkv"):
        path = rf"{BLOCK}attention\.{letter}"
        bias = fused_part(RESHAPED, index * D, 3 * D)
        matrix_rows += [
            Weight(rf"{path}\.weight", f"{block}attn.c_attn.weight", _conv1d(index)),
            Weight(rf"{path}\.bias", f"{block}attn.c_attn.bias", bias),
        ]
    others = rows(
        {"head": "lm_head"},
        {
            rf"{BLOCK}attention_norm": f"{block}ln_1",
            rf"{BLOCK}mlp_norm": f"{block}ln_2",
            "norm": "transformer.ln_f",
        },
        {
            r"embed\.weight": "transformer.wte.weight",
            "positions": "transformer.wpe.weight",
        },
    )
    return WeightTable(
        (*matrix_rows, *others),
        # Old files store the causal mask, and tied ones sometimes the head.
        ignored=(r".*attn\.(masked_)?bias", r"lm_head\.weight"),
        renamed=names_outside_module("transformer", "h", "wte", "wpe", "ln_f"),
    )


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> GptConfig:
    """Read config.json; missing keys take `GPT2Config`'s defaults."""
    refuse_unsupported(config, add_cross_attention=False)
    model_dim = get_int(config, "n_embd", "hidden_size", default=768)
    return GptConfig(
        vocab_size=get_int(config, "vocab_size", default=50257),
        num_layers=get_int(config, "n_layer", "num_hidden_layers", default=12),
        model_dim=model_dim,
        num_heads=get_int(config, "n_head", "num_attention_heads", default=12),
        ffn_dim=get_int(config, "n_inner", default=4 * model_dim),
        max_len=get_int(config, "n_positions", "max_position_embeddings", default=1024),
        activation=get_activation(config, "activation_function", default="gelu_new"),
        norm_eps=get_float(config, "layer_norm_epsilon", 1e-5),
        has_position_table=True,
        is_tied=bool(config.get("tie_word_embeddings", True)),
        scales_scores=bool(config.get("scale_attn_weights", True)),
        scales_by_layer=bool(config.get("scale_attn_by_inverse_layer_idx", False)),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> GptConfig:
    """Read a GGUF file's key-values; `max_len` is the length of the position table."""
    keys = GgufKeys(metadata, "gpt2")
    keys.refuse_unread(GGUF_KEYS)
    table = tensors.get("position_embd.weight")
    max_len = keys.get_int("context_length") if table is None else table.shape[0]
    return GptConfig(max_len=max_len, has_position_table=True, **gguf_fields(keys, tensors))


GPT2 = Family(
    name="gpt2",
    models="GPT-2, DistilGPT-2, DialoGPT, Cerebras-GPT",
    build=GptDecoder,
    config_from_hf=config_from_hf,
    hf_weights=hf_weights,
    config_from_gguf=config_from_gguf,
    gguf_weights=gguf_weights,
)
