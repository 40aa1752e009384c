"""Rotary position embedding (RoPE, arXiv:2104.09864): the rotation; `nn/rope.py` has the angles."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

Rotary = tuple[Float[Array, "T half"], Float[Array, "T half"]]  # cosines, sines


def rotate(
    x: Float[Array, "T heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """Rotate the first `2 * half` dimensions of every head, in float32; the rest pass through."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a = x[..., :half].astype(jnp.float32)
    b = x[..., half : 2 * half].astype(jnp.float32)
    rotated = [a * cos - b * sin, b * cos + a * sin]
    rest = [x[..., 2 * half :]] if 2 * half < x.shape[-1] else []
    return jnp.concatenate([part.astype(x.dtype) for part in rotated] + rest, axis=-1)
