"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT, and the sentence models based on them.

They differ in where positions begin: RoBERTa's table has pad_token_id + 1 rows before the first
token's. Pooling and normalization are not part of the model: `loading/sentence_options.py` reads
their options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.encoder import Encoder, EncoderConfig
from jaxinfer.models.family import (
    LINEAR,
    LINEAR_FROM_HEADS,
    RESHAPED,
    Family,
    Weight,
    WeightTable,
)
from jaxinfer.models.gguf_config import GgufKeys
from jaxinfer.models.hf_config import get_activation, get_float, refuse_unsupported, require_ints

_BLOCK = r"blocks\.(\d+)\."
_HF_PRODUCTS = {
    r"attention\.q": r"encoder.layer.\1.attention.self.query",
    r"attention\.k": r"encoder.layer.\1.attention.self.key",
    r"attention\.v": r"encoder.layer.\1.attention.self.value",
    r"attention\.o": r"encoder.layer.\1.attention.output.dense",
    r"mlp\.up": r"encoder.layer.\1.intermediate.dense",
    r"mlp\.down": r"encoder.layer.\1.output.dense",
}
_HF_NORMS = {
    "embed_norm": "embeddings.LayerNorm",
    rf"{_BLOCK}attention_norm": r"encoder.layer.\1.attention.output.LayerNorm",
    rf"{_BLOCK}mlp_norm": r"encoder.layer.\1.output.LayerNorm",
}
_HF_TABLES = {
    r"embed\.weight": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "token_types": "embeddings.token_type_embeddings.weight",
}
# Heads on the hidden states that training used, and two constants in old files.
_HF_IGNORED = (
    r"(\w+\.)?pooler\..*",
    r"cls\..*",
    r"lm_head\..*",
    r"(\w+\.)?embeddings\.(position|token_type)_ids",
)

_GGUF_PRODUCTS = {
    r"attention\.([qkv])": r"blk.\1.attn_\2",
    r"attention\.o": r"blk.\1.attn_output",
    r"mlp\.(up|down)": r"blk.\1.ffn_\2",
}
_GGUF_NORMS = {
    "embed_norm": "token_embd_norm",
    rf"{_BLOCK}attention_norm": r"blk.\1.attn_output_norm",
    rf"{_BLOCK}mlp_norm": r"blk.\1.layer_output_norm",
}
_GGUF_TABLES = {
    r"embed\.weight": "token_embd.weight",
    "positions": "position_embd.weight",
    "token_types": "token_types.weight",
}


def _rows(
    products: Mapping[str, str],
    norms: Mapping[str, str],
    tables: Mapping[str, str],
    prefix: str,
    norm_names: tuple[str, str],
) -> tuple[Weight, ...]:
    rows = [Weight(path, prefix + stored) for path, stored in tables.items()]
    for path, stored in norms.items():
        for param, name in zip(("weight", "bias"), norm_names, strict=True):
            rows.append(Weight(rf"{path}\.{param}", f"{prefix}{stored}.{name}"))
    for path, stored in products.items():
        transform = LINEAR_FROM_HEADS if path == r"attention\.o" else LINEAR
        rows.append(Weight(rf"{_BLOCK}{path}\.weight", f"{prefix}{stored}.weight", transform))
        rows.append(Weight(rf"{_BLOCK}{path}\.bias", f"{prefix}{stored}.bias", RESHAPED))
    return tuple(rows)


def hf_weights(config: EncoderConfig) -> WeightTable:
    names = config.prefix, config.norm_names
    return WeightTable(_rows(_HF_PRODUCTS, _HF_NORMS, _HF_TABLES, *names), ignored=_HF_IGNORED)


def gguf_weights(config: EncoderConfig) -> WeightTable:
    rows = _rows(_GGUF_PRODUCTS, _GGUF_NORMS, _GGUF_TABLES, "", ("weight", "bias"))
    return WeightTable(rows, ignored=(r"cls\..*",))


_GGUF_KEYS = frozenset(("attention.head_count", "attention.layer_norm_epsilon", "attention.causal"))


def _tensor_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe tensor names.

    Models with a head have `bert.` or `roberta.` before the encoder's names, and the oldest files
    call a norm's weight and bias gamma and beta.
    """
    pattern = re.compile(r"(\w+\.|)embeddings\.word_embeddings\.weight")
    prefix = next((match[1] for name in tensors if (match := pattern.fullmatch(name))), "")
    is_old = f"{prefix}embeddings.LayerNorm.gamma" in tensors
    return {"prefix": prefix, "norm_names": ("gamma", "beta") if is_old else ("weight", "bias")}


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> EncoderConfig:
    """Read config.json; missing keys take `BertConfig`'s defaults, if it has any."""
    vocab_size, model_dim, num_layers, num_heads, ffn_dim = require_ints(
        config,
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    )
    refuse_unsupported(
        config, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False
    )
    refuse_unsupported(config, quantization_config={})
    padding = None
    if config["model_type"] != "bert":
        padding = config.get("pad_token_id", 1)
        if type(padding) is not int or padding < 0:
            raise ValueError(f"pad_token_id is {padding!r}; positions are counted from it")
    return EncoderConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        model_dim=model_dim,
        num_heads=num_heads,
        ffn_dim=ffn_dim,
        num_positions=config.get("max_position_embeddings", 512),
        num_token_types=config.get("type_vocab_size", 2),
        norm_eps=get_float(config, "layer_norm_eps", 1e-12),
        activation=get_activation(config, "hidden_act", default="gelu"),
        first_position=0 if padding is None else padding + 1,
        padding_token_id=padding,
        **_tensor_names(tensors),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> EncoderConfig:
    """Read a GGUF file's key-values; the sizes of tables are those of the tensors.

    The converter removes RoBERTa's unused first positions, so positions begin at 0.
    """
    keys = GgufKeys(metadata, "bert")
    keys.refuse_unread(_GGUF_KEYS)
    if keys.get("attention.causal", False) is not False:
        raise ValueError("bert.attention.causal is true; an encoder must be bidirectional")
    tables = ("token_embd.weight", "position_embd.weight")
    missing = [name for name in tables if name not in tensors]
    if missing:
        raise ValueError(f"the GGUF file has no tensor {' and no '.join(missing)}")
    token_types = tensors.get("token_types.weight")
    return EncoderConfig(
        vocab_size=tensors[tables[0]].shape[0],
        num_layers=keys.num_layers(),
        model_dim=keys.get_int("embedding_length"),
        num_heads=keys.get_int("attention.head_count"),
        ffn_dim=keys.get_int("feed_forward_length"),
        num_positions=tensors[tables[1]].shape[0],
        num_token_types=0 if token_types is None else token_types.shape[0],
        norm_eps=keys.get_float("attention.layer_norm_epsilon"),
    )


BERT = Family(
    name="bert",
    models="BERT, RoBERTa, XLM-RoBERTa, CamemBERT; MiniLM, E5, BGE",
    build=Encoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=hf_weights,
    gguf_weights=gguf_weights,
)
