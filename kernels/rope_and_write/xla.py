"""Rotary embedding and cache write in plain JAX: the rotation, then a scatter.

Formula and contract: `api.py`.
"""

from __future__ import annotations

from jaxinfer.kernels.kv_pages import KVPages, NewTokens, write
from jaxinfer.kernels.rotary import Rotary, rotate


def rope_and_write(
    q,  # [T, N, H]
    new: NewTokens,
    rotary: Rotary | None,
    pages: KVPages,  # k, v: [P, K, B, H] or folded
):
    """Return (rotated queries, pages)."""
    if rotary is not None:
        q, new = rotate(q, *rotary), new._replace(k=rotate(new.k, *rotary))
    return q, write(pages, new)
