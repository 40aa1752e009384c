"""From the hidden states of a text's tokens to one vector (Sentence-BERT, arXiv:1908.10084).

With h[t] the hidden state of token t of a text of n tokens, special tokens included:

    cls                    h[0]
    lasttoken              h[n - 1]
    max                    max_t h[t], each number by itself
    mean                   sum_t h[t] / n
    mean_sqrt_len_tokens   sum_t h[t] / sqrt(n)
    weightedmean           sum_t (t + 1) h[t] / sum_t (t + 1)      (SGPT, arXiv:2202.08904)

Several modes give their vectors one behind the other, in the order of `MODES`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# In the order in which a checkpoint that asks for several has them joined.
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pool(
    hidden: Float[Array, "R T D"], lengths: Int[Array, " R"], modes: tuple[str, ...]
) -> Float[Array, "R outputs"]:
    """One float32 vector a row, of its first `lengths[r]` tokens; formulas in the module's text.

    A row of length 0 gives no number to rely on.
    """
    x = hidden.astype(jnp.float32)
    return jnp.concatenate([_pooled(x, lengths, mode) for mode in modes], axis=-1)


def _pooled(x, lengths, mode):
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
