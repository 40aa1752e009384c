"""Attention of a ragged batch over a paged KV cache; see `api.py`."""

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.paged_attention.api import BACKENDS, paged_attention
from jaxinfer.kernels.paged_attention.rows import RaggedRows

__all__ = ["BACKENDS", "AttentionVariant", "RaggedRows", "paged_attention"]
