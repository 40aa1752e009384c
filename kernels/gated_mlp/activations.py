"""The activations of a gated layer, by the names of Hugging Face's configurations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    # By erf, since Mosaic has no erfc; the digits that cancel in it are below float32's beside 1.
    "gelu": lambda x: 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5))),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
