"""Flash attention, the obvious way: the whole T x S matrix of scores, one dense softmax.

Computes in float64 where JAX has it switched on, float32 otherwise. Formula: `api.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.flash_attention.rule import FlashArrays, FlashRule, is_seen, scores


def flash_attention(
    q,  # [R, T, N, H]
    k,  # [R, S, K, H]
    v,  # [R, S, K, H]
    arrays: FlashArrays,
    rule: FlashRule,
):
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    R, T, N, H = q.shape
    S, K = k.shape[1:3]

    # Everything below is [R, N, T, S] or broadcasts to it.
    per_head = lambda x: x.astype(wide)[:, None, None]
    row = jnp.arange(R, dtype=jnp.int32)[:, None, None, None]
    head = jnp.arange(N, dtype=jnp.int32)[:, None, None]
    t = jnp.arange(T, dtype=jnp.int32)[:, None]
    q_position = arrays.offsets(R)[:, None, None, None] + t
    s = jnp.arange(S, dtype=jnp.int32)
    length = arrays.lengths(R, S)[:, None, None, None]
    intervals = []
    if arrays.hidden is not None:
        at = lambda x, c: x[:, c][:, None, None]
        count = arrays.hidden.start.shape[1]
        intervals = [(at(arrays.hidden.start, c), at(arrays.hidden.end, c)) for c in range(count)]
    seen = is_seen(rule, row, head, q_position, s, length, intervals)
    may_be_read = s < length
    if arrays.block_mask is not None:
        mask = arrays.block_mask
        kind = mask.kind[:, :, jnp.arange(T) // mask.q_block][..., s // mask.k_block]
        seen &= kind > 0
        read = (kind > 0).any(axis=2, keepdims=True)  # [R, N, 1, S]
        read = jnp.broadcast_to(read, (R, N, 1, S)).reshape(R, K, N // K, S).any(axis=2)
        may_be_read = may_be_read & read[:, :, None]
    seen = jnp.broadcast_to(seen, (R, N, T, S))

    # What no query may read can be anything, NaN included.
    may_be_read = jnp.broadcast_to(may_be_read[:, :, 0], (R, K, S)).swapaxes(1, 2)[..., None]
    k, v = (jnp.where(may_be_read, x, 0).astype(wide) for x in (k, v))
    z = jnp.einsum("rtkgh,rskh->rkgts", q.astype(wide).reshape(R, T, K, N // K, H), k)
    z = z.reshape(R, N, T, S) * rule.scale
    slopes = None if arrays.alibi_slopes is None else per_head(arrays.alibi_slopes)
    z = scores(rule, z, row, head, q_position, s, slopes)
    z = jnp.where(seen, z, -jnp.inf)
    if arrays.sinks is not None:  # one more position, without a value
        z = jnp.concatenate([z, jnp.broadcast_to(per_head(arrays.sinks), (R, N, T, 1))], axis=-1)
    top = z.max(axis=-1, keepdims=True)
    weight = jnp.exp(z - jnp.where(jnp.isfinite(top), top, 0))
    total = weight.sum(axis=-1, keepdims=True)
    lse = jnp.where(total > 0, jnp.log(total) + top, -jnp.inf)[..., 0]
    weight = (weight / jnp.where(total == 0, 1, total))[..., :S]
    out = jnp.einsum("rkgts,rskh->rtkgh", weight.reshape(R, K, N // K, T, S), v)
    lse = lse.swapaxes(1, 2).astype(jnp.float32) if rule.return_lse else None
    return out.reshape(R, T, N, H).astype(q.dtype), lse
