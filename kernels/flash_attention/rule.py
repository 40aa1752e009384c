"""The arguments of flash attention other than queries, keys and values; formula: `api.py`.

`FlashRule` is static (a program is compiled for it), `FlashArrays` holds the arrays. `scores` and
`is_seen` are the formula itself on numbers that broadcast together, for every backend in JAX,
inside a Pallas kernel or outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.kernels.attention_variant import AttentionVariant

# Functions of int32s that broadcast together: mask_mod(row, head, q_position, k_position) -> bool,
# and
# score_mod(score, row, head, q_position, k_position) -> score.
Mod = Callable[..., Any]


class ColumnIntervals(NamedTuple):
    """Key s of row r is hidden from the queries at positions in [start[r, c, s], end[r, c, s]),
    for each of C intervals; an empty one (start >= end) hides nothing.

    FlashMask's column-wise form (arXiv:2410.01359): documents in one row, prefixes, global tokens
    and windows take one or two intervals a key, 2 x C x S integers in place of a T x S mask.
    """

    start: Any  # int32 [R, C, S]
    end: Any  # int32 [R, C, S]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Which blocks of q_block queries by k_block keys a mask_mod leaves empty (0), cuts (1) or
    leaves whole (2), with the first query at position `q_offset`.

    An axis of 1 stands for all rows or heads. Made by `block_mask`.
    """

    kind: Any  # int32 [R or 1, N or 1, TQ, TK]
    q_block: int = dataclasses.field(metadata={"static": True})
    k_block: int = dataclasses.field(metadata={"static": True})
    q_offset: int = dataclasses.field(metadata={"static": True}, default=0)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees; the formula is in `api.py`.

    A pytree: a program is compiled for `causal`, `mask_mod` and a `q_offset` that is an int, the
    arrays are its inputs. `q_offset` None is S - T if `causal`, else 0.
    """

    causal: bool = False
    mask_mod: Mod | None = None
    q_offset: Any = None  # int, or int32 [] or [R]
    kv_len: Any = None  # int32 [R]; None: S everywhere
    hidden: ColumnIntervals | None = None  # [R, C, S]
    block_mask: BlockMask | None = None  # made of `mask_mod` at this `q_offset`

    def tree_flatten(self) -> tuple[Any, Any]:
        offset = self.q_offset
        is_static = offset is None or isinstance(offset, int)
        arrays = (None if is_static else offset, self.kv_len, self.hidden, self.block_mask)
        return arrays, (self.causal, self.mask_mod, offset if is_static else None)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> AttentionMask:
        (causal, mask_mod, static_offset), (offset, *rest) = static, arrays
        return cls(causal, mask_mod, static_offset if offset is None else offset, *rest)

    def offset_of(self, num_queries: int, num_keys: int) -> Any:
        """Return the position of the first query."""
        if self.q_offset is not None:
            return self.q_offset
        return num_keys - num_queries if self.causal else 0


NO_MASK = AttentionMask()


@dataclasses.dataclass(frozen=True)
class FlashRule:
    """The static part of a call, which a program is compiled for."""

    scale: float
    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    mask_mod: Mod | None = None
    score_mod: Mod | None = None
    return_lse: bool = False


class FlashArrays(NamedTuple):
    """The arrays of a call other than q, k and v."""

    q_offset: Any = 0  # int, or [] or [R]
    kv_len: Any = None  # None: S everywhere; or [R]
    sinks: Any = None  # [N]
    alibi_slopes: Any = None  # [N]
    hidden: ColumnIntervals | None = None  # [R, C, S]
    block_mask: BlockMask | None = None

    def offsets(self, R: int):
        """Return the position of each row's first query: [R]."""
        return jnp.broadcast_to(jnp.asarray(self.q_offset, jnp.int32), (R,))

    def lengths(self, R: int, S: int):
        """Return the number of keys of each row, at most S: [R]."""
        if self.kv_len is None:
            return jnp.full((R,), S, jnp.int32)
        return jnp.minimum(self.kv_len, S).astype(jnp.int32)


def scores(rule: FlashRule, z, row, head, q_position, k_position, slope=None):
    """Return the scores that go into the softmax, of scaled products of queries and keys."""
    if rule.soft_cap is not None:
        z = rule.soft_cap * jnp.tanh(z / rule.soft_cap)
    if slope is not None:
        z = z - slope * jnp.abs(q_position - k_position).astype(z.dtype)
    if rule.score_mod is not None:
        z = rule.score_mod(z, row, head, q_position, k_position).astype(z.dtype)
    return z


def is_seen(rule: FlashRule, row, head, q_position, k_position, length, intervals=()):
    """Return whether the query sees the key; `intervals` are the key's pairs (start, end)."""
    seen = k_position < length
    if rule.causal:
        seen &= k_position <= q_position
    if rule.window is not None:
        seen &= k_position > q_position - rule.window
        if not rule.causal:
            seen &= k_position < q_position + rule.window
    for start, end in intervals:
        seen &= (q_position < start) | (q_position >= end)
    if rule.mask_mod is not None:
        seen &= rule.mask_mod(row, head, q_position, k_position)
    return seen


# Options whose presence a tiling depends on: they take registers, or leave tiles out.
FEATURES = ("alibi_slopes", "mask_mod", "score_mod", "hidden")


class Features(NamedTuple):
    """What a tiling depends on other than shapes and types."""

    used: tuple[str, ...] = ()  # the `FEATURES` that the call uses
    causal: bool = False
    window: int | None = None
    block_mask: BlockMask | None = None


PLAIN = Features()


def features_of_call(
    variant: AttentionVariant, mask: AttentionMask = NO_MASK, score_mod: Mod | None = None
) -> Features:
    """Return the features of a call of `flash_attention`."""
    values = (variant.alibi_slopes, mask.mask_mod, score_mod, mask.hidden)
    used = tuple(n for n, value in zip(FEATURES, values, strict=True) if value is not None)
    return Features(used, mask.causal, variant.window, mask.block_mask)


def features_of(arrays: FlashArrays, rule: FlashRule) -> Features:
    """Return the features of a call, from what a backend is given."""
    values = (arrays.alibi_slopes, rule.mask_mod, rule.score_mod, arrays.hidden)
    used = tuple(n for n, value in zip(FEATURES, values, strict=True) if value is not None)
    return Features(used, rule.causal, rule.window, arrays.block_mask)


def tiling_key(
    q, k, _v, variant: AttentionVariant, mask: AttentionMask = NO_MASK, *,
    score_mod: Mod | None = None, **_: Any,
) -> str:  # fmt: skip
    """Return the key of a measured tiling for the arguments of `flash_attention`."""
    return key_of(q, k, features_of_call(variant, mask, score_mod))


def key_of(q, k, features: Features) -> str:
    """Return the key of a measured tiling."""
    (_, T, N, H), (_, S, K, _) = q.shape, k.shape
    marks = [*features.used]
    marks += ["causal"] if features.causal else []
    marks += [f"window={features.window}"] if features.window else []
    if mask := features.block_mask:
        marks.append(f"blocks={mask.q_block}x{mask.k_block}")
    return " ".join([f"T={T} S={S} N={N} K={K} H={H} {jnp.dtype(q.dtype).name}", *marks])


def closed_over(mod: Mod | None, *score_args: Any) -> tuple[Any, ...]:
    """Return the arrays that a mod closes over; `score_args` are its arguments before the
    indices."""
    if mod is None:
        return ()
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return tuple(jax.make_jaxpr(mod)(*score_args, *(index,) * 4).consts)


def decline_closures(rule: FlashRule) -> None:
    """Raise `NotImplementedError` for mods that close over arrays, which a kernel cannot hold."""
    score = jax.ShapeDtypeStruct((), jnp.float32)
    for name, found in (
        ("mask_mod", closed_over(rule.mask_mod)),
        ("score_mod", closed_over(rule.score_mod, score)),
    ):
        if found:
            shapes = ", ".join(str(jnp.shape(x)) for x in found)
            raise NotImplementedError(
                f"{name} closes over arrays ({shapes}); a kernel takes constants and indices, and "
                "masks by array as column intervals (hidden=)"
            )
