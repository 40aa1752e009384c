"""Weight-table rows and GGUF fields that the GPT-like families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxinfer.models.family import (
    LINEAR,
    LINEAR_FROM_HEADS,
    RESHAPED,
    Shape,
    Transform,
    Weight,
    WeightTable,
    fused_part,
)
from jaxinfer.models.gguf_config import GgufKeys
from jaxinfer.models.gpt import GptConfig

BLOCK = r"blocks\.(\d+)\."
# The keys that `gguf_fields` reads, among those that `GgufKeys.refuse_unread` checks.
GGUF_KEYS = frozenset(
    ("attention.head_count", "attention.head_count_kv", "attention.layer_norm_epsilon")
)


def names_outside_module(outer: str, *inner: str) -> tuple[tuple[str, str], ...]:
    """Return `WeightTable.renamed` for models saved without their head.

    Their `inner` modules have names without the prefix of the module `outer`.
    """
    return ((rf"((?:{'|'.join(inner)})\..*)", rf"{outer}.\1"),)


def rows(
    products: Mapping[str, str], norms: Mapping[str, str], tables: Mapping[str, str]
) -> tuple[Weight, ...]:
    """Return weight-table rows from module paths (regex) to the modules' stored names."""
    found = [Weight(path, stored) for path, stored in tables.items()]
    for path, stored in norms.items():
        found += [Weight(rf"{path}\.{name}", f"{stored}.{name}") for name in ("weight", "bias")]
    for path, stored in products.items():
        transform = LINEAR_FROM_HEADS if path.endswith(r"attention\.o") else LINEAR
        found.append(Weight(rf"{path}\.weight", f"{stored}.weight", transform))
        found.append(Weight(rf"{path}\.bias", f"{stored}.bias", RESHAPED))
    return tuple(found)


def fused_qkv_rows(stored: str, part: Callable[[Transform, int], Transform]) -> tuple[Weight, ...]:
    """Return the rows of q, k and v in one fused tensor; `part(transform, index)` selects one."""
    found = []
    for index, letter in enumerate("qkv"):
        path = rf"{BLOCK}attention\.{letter}"
        found.append(Weight(rf"{path}\.weight", f"{stored}.weight", part(LINEAR, index)))
        found.append(Weight(rf"{path}\.bias", f"{stored}.bias", part(RESHAPED, index)))
    return tuple(found)


def interleaved(transform: Transform, index: int) -> Transform:
    """Return `transform` for q, k or v (`index` 0, 1, 2) in a fused tensor.

    For each head the tensor has the head's rows of q, then of k, then of v.
    """

    def stored_shape(shape: Shape) -> Shape:
        num_rows, *others = transform.stored_shape(shape)
        return (3 * num_rows, *others)

    def rows_of(shape: Shape) -> np.ndarray:
        heads, head_dim = shape[-2:]
        return np.arange(3 * heads * head_dim).reshape(heads, 3, head_dim)[:, index].reshape(-1)

    return dataclasses.replace(transform, stored_shape=stored_shape, rows=rows_of)


_GGUF_ROWS = rows(
    {
        rf"{BLOCK}attention\.o": r"blk.\1.attn_output",
        rf"{BLOCK}mlp\.up": r"blk.\1.ffn_up",
        rf"{BLOCK}mlp\.down": r"blk.\1.ffn_down",
        "head": "output",
    },
    {
        r"blocks\.0\.embedding_norm": "token_embd_norm",
        rf"{BLOCK}attention_norm": r"blk.\1.attn_norm",
        rf"{BLOCK}mlp_norm": r"blk.\1.ffn_norm",
        "norm": "output_norm",
    },
    {r"embed\.weight": "token_embd.weight", "positions": "position_embd.weight"},
)


def gguf_weights(config: GptConfig) -> WeightTable:
    """Return the GGUF weight table; the fused tensor has the rows of q, then k, then v."""
    D = config.model_dim
    part = lambda transform, index: fused_part(transform, index * D, 3 * D)
    return WeightTable(fused_qkv_rows(r"blk.\1.attn_qkv", part) + _GGUF_ROWS)


def gguf_fields(keys: GgufKeys, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `GptConfig` that all these architectures store alike."""
    num_heads, embedding = keys.get_int("attention.head_count"), tensors.get("token_embd.weight")
    num_kv_heads = keys.get("attention.head_count_kv", num_heads)
    if num_kv_heads != num_heads:
        raise ValueError(
            f"{keys.architecture}.attention.head_count_kv is {num_kv_heads}; in this family it "
            f"must equal head_count ({num_heads})"
        )
    return {
        "vocab_size": keys.get_int("vocab_size") if embedding is None else embedding.shape[0],
        "num_layers": keys.num_layers(),
        "model_dim": keys.get_int("embedding_length"),
        "num_heads": num_heads,
        "ffn_dim": keys.get_int("feed_forward_length"),
        "norm_eps": keys.get_float("attention.layer_norm_epsilon"),
        "is_tied": "output.weight" not in tensors,
    }
