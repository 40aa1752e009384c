"""Attention that is not paged (encoders, whole prompts, ring chunks): signature and formula.

R rows of T queries attend to S keys. The keys of a row have positions 0 .. S-1, its query t has
position p = q_offset + t. For head n (KV head n // G), over positions s:

    z[s]  = scale * q . k[s]
    z[s]  = soft_cap * tanh(z[s] / soft_cap)    if soft_cap       (Gemma 2, arXiv:2408.00118)
    z[s] -= alibi_slopes[n] * |p - s|           if alibi_slopes   (ALiBi, arXiv:2108.12409)
    z[s]  = score_mod(z[s], r, n, p, s)         if score_mod      (FlexAttention, arXiv:2412.05496)
    z[s]  = -inf  unless  s < kv_len  and       (padding)
                          s <= p                if causal
                          s > p - window        if window; also s < p + window unless causal
                          mask_mod(r, n, p, s)  if mask_mod       (FlexAttention)
                          p in no [start[r, c, s], end[r, c, s])  (hidden: FlashMask, 2410.01359)
    out   = sum_s exp(z[s]) v[s] / (sum_s exp(z[s]) + exp(sinks[n]))   (gpt-oss; without sinks: 0)
    lse   = log(sum_s exp(z[s]) + exp(sinks[n]));  -inf, and out 0, where nothing is seen

computed by online softmax over tiles of keys (FlashAttention, arXiv:2205.14135, 2307.08691); tiles
that no query sees are not visited.

Keys and values at or past `kv_len`, and those in blocks that `block_mask` marks empty for all
queries of the KV head, may hold anything, NaN included; the others must be finite.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.flash_attention import gpu, reference, tpu, xla
from jaxinfer.kernels.flash_attention.rule import (
    NO_MASK,
    AttentionMask,
    FlashArrays,
    FlashRule,
    Mod,
)

BACKENDS = {
    "reference": reference.flash_attention,
    "xla": xla.flash_attention,
    "tpu": tpu.flash_attention,
    "gpu": gpu.flash_attention,
}


def flash_attention(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R S K H"],
    v: Float[Array, "R S K H"],
    variant: AttentionVariant,
    mask: AttentionMask = NO_MASK,
    *,
    score_mod: Mod | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attend from every query to its row's keys: [R, T, N, H], with `return_lse` (out, [R, T, N]).

    Formula in the module's text. Without `mask.q_offset` the last query sees the last key if
    causal; an int lets the tiles to visit be listed while tracing. Products and sums are float32,
    the result has q's dtype, lse is float32.

    Mods are elementwise JAX functions of int32s that broadcast together; pass the same function
    object in every call, since a program is compiled for it. `mask.block_mask` must be that of
    `mask_mod` at this `q_offset`, which must be an int then, to be compared; without one, every
    tile that the rest allows is computed and masked. Raises `ValueError` for shapes that do not fit
    together and `NoBackendError` where every backend declines.
    """
    _check_shapes(q, k, v)
    _check_lengths(q, k, mask)
    variant.check(q.shape[2])
    if variant.value_dim is not None:
        raise ValueError(f"value_dim is {variant.value_dim}; it is for pages without values: None")
    q_offset = mask.offset_of(q.shape[1], k.shape[1])
    _check_block_mask(q, k, q_offset, mask)
    arrays = FlashArrays(
        q_offset, mask.kv_len, variant.sinks, variant.alibi_slopes, mask.hidden, mask.block_mask
    )
    rule = FlashRule(
        variant.scale, mask.causal, variant.window, variant.soft_cap, mask.mask_mod, score_mod,
        return_lse,
    )  # fmt: skip
    out, lse = dispatch("flash_attention", BACKENDS, backend, q, k, v, arrays, rule)
    return (out, lse) if return_lse else out


def merge(
    out_a: Float[Array, "R T N H"],
    lse_a: Float[Array, "R T N"],
    out_b: Float[Array, "R T N H"],
    lse_b: Float[Array, "R T N"],
) -> tuple[Float[Array, "R T N H"], Float[Array, "R T N"]]:
    """Return the attention over two disjoint sets of keys from that over each: (out, lse).

    Sums in float32, `out` has out_a's dtype. Only one of the two may have been computed with sinks.
    """
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    share = lambda weight: (weight / jnp.where(total == 0, 1, total))[..., None]
    out = out_a.astype(jnp.float32) * share(weight_a) + out_b.astype(jnp.float32) * share(weight_b)
    return out.astype(out_a.dtype), jnp.log(total) + top


def _check_shapes(q, k, v) -> None:
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in rows or head dim")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} KV heads")
    if not all(q.shape) or not all(k.shape):
        raise ValueError(f"q {q.shape} or k {k.shape} is empty; leave the call out")


def _check_lengths(q, k, mask: AttentionMask) -> None:
    q_offset, kv_len, hidden = mask.q_offset, mask.kv_len, mask.hidden
    shape = () if q_offset is None else jnp.shape(q_offset)
    if shape not in ((), (q.shape[0],)):
        raise ValueError(f"q_offset has shape {shape}; it must be () or ({q.shape[0]},)")
    if kv_len is not None and kv_len.shape != (q.shape[0],):
        raise ValueError(f"kv_len has shape {kv_len.shape}; it must be ({q.shape[0]},)")
    if hidden is not None:
        shapes = hidden.start.shape, hidden.end.shape
        for shape in shapes:
            if len(shape) != 3 or shape[0] != k.shape[0] or shape[2] != k.shape[1]:
                raise ValueError(
                    f"hidden has shape {shape}; it must be ({k.shape[0]}, C, {k.shape[1]})"
                )
        if shapes[0] != shapes[1]:
            raise ValueError(f"hidden's start {shapes[0]} and end {shapes[1]} differ in shape")


def _check_block_mask(q, k, q_offset, mask: AttentionMask) -> None:
    block_mask = mask.block_mask
    if block_mask is None:
        return
    if mask.mask_mod is None:
        raise ValueError("a block_mask without its mask_mod: blocks that are cut need both")
    R, T, N, _ = q.shape
    rows, heads, TQ, TK = block_mask.kind.shape
    blocks = -(-T // block_mask.q_block), -(-k.shape[1] // block_mask.k_block)
    if rows not in (1, R) or heads not in (1, N) or blocks != (TQ, TK):
        raise ValueError(
            f"block_mask is for {rows} rows, {heads} heads, {TQ} x {TK} blocks; the call has "
            f"{R} (or 1), {N} (or 1), {blocks[0]} x {blocks[1]}"
        )
    if not isinstance(q_offset, int):
        raise ValueError(
            f"q_offset is of type {type(q_offset).__name__}, block_mask for {block_mask.q_offset}: "
            "only an int can be compared; give one, or no block_mask"
        )
    if q_offset != block_mask.q_offset:
        raise ValueError(
            f"block_mask is for q_offset {block_mask.q_offset}, the call has {q_offset}"
        )
