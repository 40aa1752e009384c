"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT, and the sentence models made of them.

They differ in where positions begin: RoBERTa's table has padding's id + 1 rows before the first
token's. Pooling and normalization are no part of the model: `loading/sentence.py` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxinfer.models.encoder import Encoder, EncoderConfig
from jaxinfer.models.family import (
    LINEAR,
    LINEAR_FROM_HEADS,
    RESHAPED,
    Family,
    Weight,
    WeightTable,
)

T = TypeVar("T")

_BLOCK = r"blocks\.(\d+)\."


def _rows(
    names: Mapping[str, str], norms: Mapping[str, str], tables: Mapping[str, str]
) -> tuple[Weight, ...]:
    """The rows of a format: stored names of a block's products and norms, and of the tables."""
    rows = [Weight(re.escape(path), stored) for path, stored in tables.items()]
    for path, stored in norms.items():
        rows.append(Weight(path + r"\.(weight|bias)", stored))
    for path, stored in names.items():
        transform = LINEAR_FROM_HEADS if path == r"attention\.o" else LINEAR
        rows.append(Weight(rf"{_BLOCK}{path}\.weight", stored + ".weight", transform))
        rows.append(Weight(rf"{_BLOCK}{path}\.bias", stored + ".bias", RESHAPED))
    return tuple(rows)


HF_WEIGHTS = WeightTable(
    _rows(
        {
            r"attention\.q": r"encoder.layer.\1.attention.self.query",
            r"attention\.k": r"encoder.layer.\1.attention.self.key",
            r"attention\.v": r"encoder.layer.\1.attention.self.value",
            r"attention\.o": r"encoder.layer.\1.attention.output.dense",
            r"mlp\.up": r"encoder.layer.\1.intermediate.dense",
            r"mlp\.down": r"encoder.layer.\1.output.dense",
        },
        {
            "embed_norm": r"embeddings.LayerNorm.\1",
            rf"{_BLOCK}attention_norm": r"encoder.layer.\1.attention.output.LayerNorm.\2",
            rf"{_BLOCK}mlp_norm": r"encoder.layer.\1.output.LayerNorm.\2",
        },
        {
            "embed.weight": "embeddings.word_embeddings.weight",
            "positions": "embeddings.position_embeddings.weight",
            "token_types": "embeddings.token_type_embeddings.weight",
        },
    ),
    # What stands on the hidden states for training, and two constants that old files carry.
    ignored=(r"pooler\..*", r"cls\..*", r"lm_head\..*", r"embeddings\.(position|token_type)_ids"),
)

GGUF_WEIGHTS = WeightTable(
    _rows(
        {
            r"attention\.([qkv])": r"blk.\1.attn_\2",
            r"attention\.o": r"blk.\1.attn_output",
            r"mlp\.(up|down)": r"blk.\1.ffn_\2",
        },
        {
            "embed_norm": r"token_embd_norm.\1",
            rf"{_BLOCK}attention_norm": r"blk.\1.attn_output_norm.\2",
            rf"{_BLOCK}mlp_norm": r"blk.\1.layer_output_norm.\2",
        },
        {
            "embed.weight": "token_embd.weight",
            "positions": "position_embd.weight",
            "token_types": "token_types.weight",
        },
    ),
    ignored=(r"cls\..*",),
)

# Other spellings of activations that the kernels have.
_ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}
# config.json's keys that would change the arithmetic, with the values that do not.
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None, {}),
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
# The same of a GGUF file's keys below `bert.`, and those that are read.
_GGUF_MUST_BE: Mapping[str, tuple[Any, ...]] = {"attention.causal": (None, False)}
_GGUF_KEYS = frozenset(("attention.head_count", "attention.layer_norm_epsilon"))


def plain_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors by the names of the bare encoder: without `bert.` or `roberta.` before them, and
    with `weight` and `bias` for the `gamma` and `beta` of the oldest files.

    `ValueError` for two tensors of one name.
    """
    plain: dict[str, T] = {}
    for stored, tensor in tensors.items():
        name = re.sub(r"^(bert|roberta)\.", "", stored)
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if name in plain:
            raise ValueError(f"the tensor {name} is there twice, once as {stored}; remove one")
        plain[name] = tensor
    return plain


def config_from_hf(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> EncoderConfig:
    """From config.json; missing keys take `BertConfig`'s defaults where it has any."""
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"config.json lacks a whole number for {', '.join(missing)}")
    refused = [
        f"{key} is {config[key]!r}; {values[-1]!r} alone is supported"
        for key, values in _MUST_BE.items()
        if config.get(key) not in values
    ]
    if refused:
        raise ValueError("; ".join(refused))
    padding = None
    if config["model_type"] != "bert":
        padding = config.get("pad_token_id", 1)
        if type(padding) is not int or padding < 0:
            raise ValueError(f"pad_token_id is {padding!r}; positions are counted from it")
    activation = config.get("hidden_act", "gelu")
    return EncoderConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        model_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        ffn_dim=config["intermediate_size"],
        num_positions=config.get("max_position_embeddings", 512),
        num_token_types=config.get("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        activation=_ACTIVATIONS.get(activation, activation),
        first_position=0 if padding is None else padding + 1,
        unplaced_token_id=padding,
    )


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> EncoderConfig:
    """From a GGUF file's key-values; the sizes of tables are read off the tensors.

    A converter cuts RoBERTa's unused first positions off, so tokens are counted from 0.
    """

    def key(name: str) -> Any:
        if metadata.get(f"bert.{name}") is None:
            raise ValueError(f"the GGUF file has no bert.{name}")
        return metadata[f"bert.{name}"]

    refused = [
        f"bert.{name} is {metadata[f'bert.{name}']!r}; {values[-1]!r} alone is supported"
        for name, values in _GGUF_MUST_BE.items()
        if metadata.get(f"bert.{name}") not in values
    ]
    known = _GGUF_KEYS | _GGUF_MUST_BE.keys()
    refused += [
        f"bert.{name} is set, which this build cannot honour"
        for name in (n.removeprefix("bert.") for n in metadata if n.startswith("bert."))
        if name.startswith(("attention.", "rope.")) and name not in known
    ]
    if refused:
        raise ValueError("; ".join(refused))
    tables = ("token_embd.weight", "position_embd.weight")
    missing = [name for name in tables if name not in tensors]
    if missing:
        raise ValueError(f"the GGUF file has no tensor {' and no '.join(missing)}")
    token_types = tensors.get("token_types.weight")
    return EncoderConfig(
        vocab_size=tensors[tables[0]].shape[0],
        num_layers=key("block_count"),
        model_dim=key("embedding_length"),
        num_heads=key("attention.head_count"),
        ffn_dim=key("feed_forward_length"),
        num_positions=tensors[tables[1]].shape[0],
        num_token_types=0 if token_types is None else token_types.shape[0],
        norm_eps=key("attention.layer_norm_epsilon"),
    )


BERT = Family(
    name="bert",
    build=Encoder,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_weights=HF_WEIGHTS,
    gguf_weights=GGUF_WEIGHTS,
)
