"""One layer's paged KV cache as device arrays: how a page is laid out, stored to and quantized.

Offset b of page p holds a token's K heads of keys and of values; or of keys alone, whose first
numbers are the values (the latents of DeepSeek-V2, arXiv:2405.04434). Pages of int8 or
float8_e4m3fn come with one scale a token and head, so that a token is stored once and never again
when others join its page: value = stored * scale. A slot is an offset of a page.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxinfer.kernels.folding import fold_of, write_folded

# Largest number that each quantized type holds.
QUANTIZED = {"int8": 127.0, "float8_e4m3fn": 448.0}


class KVPages(NamedTuple):
    """Rows and lanes are B and H, or folded (`folding.py`).

    Scales are present where, and only where, the pages' type needs them; that of offset b is at
    `scale_offset(b)`.
    """

    k: Shaped[Array, "P K rows lanes"]
    v: Shaped[Array, "P K rows lanes"] | None  # None: the values are the keys' first numbers
    k_scales: Float[Array, "P K B"] | None = None
    v_scales: Float[Array, "P K B"] | None = None


def is_quantized(dtype) -> bool:
    """Return whether pages of this type come with scales."""
    return jnp.dtype(dtype).name in QUANTIZED


def quantize_heads(
    x: Float[Array, "T K H"], dtype
) -> tuple[Shaped[Array, "T K H"], Float[Array, "T K"]]:
    """Return `x / scale` in the quantized type and the float32 scale of each token and head.

    The scale is amax / largest.
    int8 rounds to nearest even. Heads of zeros keep a scale of 1.
    """
    wide, largest = x.astype(jnp.float32), QUANTIZED[jnp.dtype(dtype).name]
    amax = jnp.abs(wide).max(axis=-1)
    scale = jnp.where(amax > 0, amax / largest, 1.0)
    scaled = jnp.clip(wide / scale[..., None], -largest, largest)
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.rint(scaled)
    return scaled.astype(dtype), scale


def scale_offset(offset: jax.Array, rows: int, fold: int) -> jax.Array:
    """Return where the scale of the token at a page offset is kept.

    All first parts of the rows of lanes, then all second ones: a TPU's kernel works part by part.
    """
    return offset if fold == 1 else offset % fold * rows + offset // fold


def write_pages(
    pages: Shaped[Array, "P K rows lanes"],
    new: Shaped[Array, "T K H"],
    page: Int[Array, " T"],
    offset: Int[Array, " T"],
) -> Shaped[Array, "P K rows lanes"]:
    """Put `new[t]` at `offset[t]` of `page[t]`; a token whose page is P or more is dropped.

    In place when the caller's jit donates `pages`: the cost follows T, not the pool. For folded
    pages, tokens of one page must be adjacent in `new`, as a row's tokens are.
    """
    if pages.shape[3] != new.shape[2]:
        return write_folded(pages, new, page, offset)
    return pages.at[page, :, offset].set(new.astype(pages.dtype), mode="drop")


class NewTokens(NamedTuple):
    """Keys and values of a step's tokens, and the slots that they are stored in.

    Token t goes to offset `offset[t]` of page `page[t]`; one whose page is P or more is not stored.
    """

    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"] | None  # None: pages without values
    page: Int[Array, " T"]
    offset: Int[Array, " T"]


class StoredTokens(NamedTuple):
    """Keys and values of T tokens as pages store them."""

    k: Shaped[Array, "T K H"]
    v: Shaped[Array, "T K H"] | None
    k_scales: Float[Array, "T K"] | None
    v_scales: Float[Array, "T K"] | None


def as_stored(
    pages: KVPages, k: Float[Array, "T K H"], v: Float[Array, "T K H"] | None
) -> StoredTokens:
    """Return tokens in the pages' type, quantized where it is; without values for pages without."""
    store = lambda x, pages: quantize_heads(x, pages.dtype)
    if not is_quantized(pages.k.dtype):
        store = lambda x, pages: (x.astype(pages.dtype), None)
    k, k_scales = store(k, pages.k)
    if pages.v is None:
        return StoredTokens(k, None, k_scales, None)
    v, v_scales = store(v, pages.v)
    return StoredTokens(k, v, k_scales, v_scales)


def write_stored(
    pages: KVPages, tokens: StoredTokens, page: Int[Array, " T"], offset: Int[Array, " T"]
) -> KVPages:
    """Put each of `tokens` at `offset[t]` of `page[t]` (`write_pages`)."""
    at = scale_offset(offset, pages.k.shape[2], fold_of(pages.k.shape[3], tokens.k.shape[2]))

    def put(stored, new):
        return write_pages(stored, new, page, offset)

    def put_scales(scales, new):
        return None if scales is None else scales.at[page, :, at].set(new, mode="drop")

    return KVPages(
        put(pages.k, tokens.k),
        None if pages.v is None else put(pages.v, tokens.v),
        put_scales(pages.k_scales, tokens.k_scales),
        put_scales(pages.v_scales, tokens.v_scales),
    )


def write(pages: KVPages, new: NewTokens) -> KVPages:
    """Store a step's keys and values, quantized where the pages are."""
    return write_stored(pages, as_stored(pages, new.k, new.v), new.page, new.offset)


def dequantized(
    stored: Shaped[Array, "*slots H"], scales: Float[Array, "*slots"] | None
) -> Shaped[Array, "*slots H"]:
    """Return the numbers of plain pages in float32; as they are where they have no scales."""
    if scales is None:
        return stored
    return stored.astype(jnp.float32) * scales[..., None]
