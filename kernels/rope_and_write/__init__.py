"""Rotates queries and keys to their positions, stores keys and values in pages; see `api.py`."""

from jaxinfer.kernels.rope_and_write.api import BACKENDS, rope_and_write

__all__ = ["BACKENDS", "rope_and_write"]
