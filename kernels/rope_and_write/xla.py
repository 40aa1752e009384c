"""Rotary embedding and cache write in plain JAX: the turn, then a scatter. Formula: `api.py`."""

from __future__ import annotations

from jaxinfer.kernels.kv_pages import write
from jaxinfer.kernels.rotary import rotate


def rope_and_write(
    q,  # [T, N, H]
    k,  # [T, K, H]
    v,  # [T, K, H] or None
    cos,  # [T, half] or None
    sin,  # [T, half] or None
    pages,  # k, v: [P, K, B, H] or folded
    page,  # [T]
    cell,  # [T]
):
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, write(pages, k, v, page, cell)
