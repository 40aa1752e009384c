"""Attention of a ragged batch over a paged KV cache; see `api.py`."""

from jaxinfer.kernels.paged_attention.api import BACKENDS, paged_attention

__all__ = ["BACKENDS", "paged_attention"]
