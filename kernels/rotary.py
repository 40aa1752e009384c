"""Rotary position embedding (arXiv:2104.09864), the turn itself; angles come from `nn/rope.py`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(
    x: Float[Array, "T heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """Turn the first `2 * half` dimensions of every head; the rest pass through. In float32."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a = x[..., :half].astype(jnp.float32)
    b = x[..., half : 2 * half].astype(jnp.float32)
    turned = [a * cos - b * sin, b * cos + a * sin]
    rest = [x[..., 2 * half :]] if 2 * half < x.shape[-1] else []
    return jnp.concatenate([t.astype(x.dtype) for t in turned] + rest, axis=-1)
