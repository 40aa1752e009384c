"""Pool the hidden states of a text's tokens into one vector (Sentence-BERT, arXiv:1908.10084).

Let h[t] be the hidden state of token t of a text of n tokens, special tokens included:

    cls                    h[0]
    lasttoken              h[n - 1]
    max                    max_t h[t], element by element
    mean                   sum_t h[t] / n
    mean_sqrt_len_tokens   sum_t h[t] / sqrt(n)
    weightedmean           sum_t (t + 1) h[t] / sum_t (t + 1)      (SGPT, arXiv:2202.08904)

The vectors of several modes are concatenated, in the order of `POOLING_MODES`
(`jaxinfer.loading.sentence_options`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def pool(
    hidden: Float[Array, "R T D"], lengths: Int[Array, " R"], modes: tuple[str, ...]
) -> Float[Array, "R outputs"]:
    """Pool the first `lengths[r]` tokens of each row r into one float32 vector.

    The module docstring gives the formulas. The vector of a row of length 0 is undefined.
    """
    x = hidden.astype(jnp.float32)
    return jnp.concatenate([_pool_one_mode(x, lengths, mode) for mode in modes], axis=-1)


def _pool_one_mode(x, lengths, mode):
    R, T, _ = x.shape
    n = jnp.maximum(lengths, 1)[:, None].astype(jnp.float32)
    is_token = (jnp.arange(T) < lengths[:, None])[..., None]  # [R, T, 1]
    if mode == "cls":
        return x[:, 0]
    if mode == "lasttoken":
        return x[jnp.arange(R), jnp.maximum(lengths - 1, 0)]
    if mode == "max":
        return jnp.where(is_token, x, -jnp.inf).max(axis=1)
    if mode == "weightedmean":
        weight = jnp.arange(1, T + 1, dtype=jnp.float32)[:, None]
        return jnp.where(is_token, x * weight, 0).sum(axis=1) / (n * (n + 1) / 2)
    total = jnp.where(is_token, x, 0).sum(axis=1)
    return total / (jnp.sqrt(n) if mode == "mean_sqrt_len_tokens" else n)
