"""Readers of a GGUF file's hyperparameters. Keys that may change the arithmetic and are not read
are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from jaxinfer.models.hf_config import check_num_layers
from jaxinfer.nn.checks import positive_errors, whole_number_errors

# Prefixes of keys that say how the model computes.
WATCHED_PREFIXES = (
    "attention.",
    "rope.",
    "expert",
    "ssm.",
    "swin_norm",
    "leading_dense",
    "attn_logit",
    "final_logit",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)


class GgufKeys:
    """The key-values of one architecture, by names without its prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata = metadata
        self.architecture = architecture

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def require(self, name: str) -> Any:
        """Return the value of a key; raise `ValueError` if it is missing."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"the GGUF file has no {self.architecture}.{name}")
        return value

    def get_int(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of at least `least`; raise `ValueError` for anything else."""
        value = self.require(name) if default is None else self.get(name, default)
        full = f"{self.architecture}.{name}"
        if wrong := whole_number_errors({full: value}, {full: least}):
            raise ValueError(wrong[0])
        return value

    def get_float(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0; raise `ValueError` for anything else."""
        value = self.require(name) if default is None else self.get(name, default)
        if wrong := positive_errors({f"{self.architecture}.{name}": value}):
            raise ValueError(wrong[0])
        return float(value)

    def get_scale(self, name: str, default: float = 1.0) -> float:
        """Return a finite number above 0; a 0 in the file means `default`, as in llama.cpp."""
        return default if self.get(name) in (None, 0) else self.get_float(name)

    def num_layers(self) -> int:
        """Return the number of blocks; raise `ValueError` if it is above the limit."""
        return check_num_layers(f"{self.architecture}.block_count", self.get_int("block_count"))

    def refuse_unread(self, read: Set[str]) -> None:
        """Raise `ValueError` for keys of attention, RoPE, experts and the like that are not in
        `read`, since each may change the arithmetic."""
        unread = [
            name
            for name in self.metadata
            if name.startswith(tuple(f"{self.architecture}.{part}" for part in WATCHED_PREFIXES))
            and name.removeprefix(f"{self.architecture}.") not in read
        ]
        if unread:
            raise ValueError(f"the GGUF file sets {', '.join(unread)}, which are not supported")


# The keys that `decoder_fields` and `models.rope_config.rope_from_gguf` read.
DECODER_KEYS = frozenset(
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
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",  # says how the model was trained, not how it computes
    )
)


def has_block_tensor(tensors: Mapping[str, Any], name: str) -> bool:
    """Whether any block has this tensor; the loader checks that all blocks that need it do."""
    return any(re.fullmatch(rf"blk\.\d+\.{re.escape(name)}", stored) for stored in tensors)


def decoder_fields(keys: GgufKeys, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig`, except `layers`, that most files store alike.

    Whether there are biases, and whether the head is tied, follows from the tensor names.
    """
    model_dim, num_heads = keys.get_int("embedding_length"), keys.get_int("attention.head_count")
    head_dim = keys.get_int("attention.key_length", max(1, model_dim // num_heads))
    if keys.get_int("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"{keys.architecture}.attention.value_length {keys.get('attention.value_length')} "
            f"differs from key_length {head_dim}; in this family they must be equal"
        )
    embedding = tensors.get("token_embd.weight")
    return {
        "vocab_size": keys.get_int("vocab_size") if embedding is None else embedding.shape[0],
        "num_layers": keys.num_layers(),
        "model_dim": model_dim,
        "num_heads": num_heads,
        "num_kv_heads": keys.get_int("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_len": keys.get_int("context_length"),
        "norm_eps": keys.get_float("attention.layer_norm_rms_epsilon"),
        "is_tied": "output.weight" not in tensors,
        "qkv_bias": has_block_tensor(tensors, "attn_q.bias"),
        "out_bias": has_block_tensor(tensors, "attn_output.bias"),
        "mlp_bias": has_block_tensor(tensors, "ffn_up.bias"),
    }
