"""Reading a GGUF file's hyperparameters: keys of one architecture; unread ones are refused."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

# Beginnings of keys that say how the model computes.
WATCHED = (
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
    """The key-values of one architecture, without its prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata = metadata
        self.architecture = architecture

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """The value of a key; `ValueError` where there is none."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"the GGUF file has no {self.architecture}.{name}")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; `ValueError` otherwise."""
        value = self.need(name) if default is None else self.get(name, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.architecture}.{name} is {value}; it must be a whole number")
        return value

    def refuse_unread(self, read: Set[str]) -> None:
        """`ValueError` for keys of attention, RoPE, experts and the like that are not `read`: each
        may change the arithmetic."""
        unread = [
            name
            for name in self.metadata
            if name.startswith(tuple(f"{self.architecture}.{part}" for part in WATCHED))
            and name.removeprefix(f"{self.architecture}.") not in read
        ]
        if unread:
            raise ValueError(
                f"the GGUF file sets {', '.join(unread)}, which this build cannot honour"
            )


# What `decoder_fields` and `models.rope_config.rope_from_gguf` read.
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
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",  # says how the model was trained, not how it computes
    )
)


def decoder_fields(keys: GgufKeys, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `DecoderConfig` that nearly all architectures state alike: all but `layers`.
    Biases and the tied head are read off the tensor names."""
    model_dim, num_heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = keys.get("attention.key_length", model_dim // num_heads)
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"{keys.architecture}.attention.value_length {keys.get('attention.value_length')} "
            f"differs from the key's length {head_dim}; this family has one head dimension"
        )
    embedding = tensors.get("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0] if embedding is not None else keys.need("vocab_size"),
        "num_layers": keys.need("block_count"),
        "model_dim": model_dim,
        "num_heads": num_heads,
        "num_kv_heads": keys.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_len": keys.need("context_length"),
        "norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "is_tied": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
