"""Folded pages: [P, K, B / f, L] for [P, K, B, H], with L a multiple of 128 and f = L // H.

A TPU keeps the last axis of an array in rows of 128 lanes. An array [P, K, B, H] whose H is no
multiple of 128 is padded to one, or laid out by XLA with another axis last, which the kernel cannot
read: the whole pool is then copied (one layer compiled for a v5e, H = 64, jax 0.10.2: 2 GiB of
temporaries for a pool of 512 MiB; folded: none).

A folded row holds f tokens side by side, token b of a page in lanes [b % f * H, (b % f + 1) * H) of
row b // f; lanes past the last token are zero. H = 64: f = 2, L = 128, nothing is wasted; H = 80 or
96: f = 1, L = 128; H = 192: f = 1, L = 256.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

LANES = 128


def rows_and_lanes(page_size: int, head_dim: int) -> tuple[int, int]:
    """Return the last two axes of folded pages; (B, H), not folded, where folding is not needed or
    B is no multiple of f."""
    fold = max(1, LANES // head_dim)
    lanes = -(-fold * head_dim // LANES) * LANES
    fold = lanes // head_dim
    if head_dim % LANES == 0 or page_size % fold:
        return page_size, head_dim
    return page_size // fold, lanes


def fold_of(lanes: int, head_dim: int) -> int:
    """Return the tokens in a row of `lanes` numbers; 0 if it cannot hold heads of `head_dim`."""
    is_folded = lanes > head_dim and lanes % LANES == 0
    return lanes // head_dim if is_folded else int(lanes == head_dim)


def unfold(pages: jax.Array, head_dim: int) -> jax.Array:
    """[P, K, B / f, L] -> [P, K, B, H]; free where the memory is row by row and L = f * H."""
    P, K, rows, lanes = pages.shape
    fold = fold_of(lanes, head_dim)
    pages = pages[..., : fold * head_dim].reshape(P, K, rows, fold, head_dim)
    return pages.reshape(P, K, rows * fold, head_dim)


def unfold_scales(scales: jax.Array, rows: int) -> jax.Array:
    """[P, K, B] in the order of `kv_pages.scale_offset` -> in the order of the page's tokens."""
    P, K, B = scales.shape
    return jnp.swapaxes(scales.reshape(P, K, B // rows, rows), 2, 3).reshape(P, K, B)


def unfolding(backend):
    """Make a backend of plain pages take folded ones too.

    A row of lanes that holds one token stays as it is: queries are padded with zeros, as the keys
    are. Removing the padding from the pages would copy the pool in every layer (one of
    DeepSeek-V2-Lite compiled for a v5e, 2000 pages of 128 latents of 576 numbers, jax 0.10.2: 281
    MiB each).
    """

    @functools.wraps(backend)
    def attend(q, rows, pages, variant, **options):
        H, (page_rows, lanes) = q.shape[2], pages.k.shape[2:]
        if fold_of(lanes, H) > 1:
            k, v = (x if x is None else unfold(x, H) for x in pages[:2])
            scales = (x if x is None else unfold_scales(x, page_rows) for x in pages[2:])
            pages = type(pages)(k, v, *scales)
        elif lanes > H:
            q = jnp.pad(q, _pad_lanes(lanes - H))
        out, lse = backend(q, rows, pages, variant, **options)
        return out[..., : variant.value_dim or H], lse

    return attend


def write_folded(pages, new, page, offset):
    """Write to folded pages [P, K, rows, L] by whole rows of lanes; see `write_pages`.

    A scatter of part of a row made XLA (v5e) copy the pool; one of whole rows is in place. So each
    token reads its row and writes it back with all the step's tokens that share it: they are among
    its f - 1 neighbours on either side, and write the same.
    """
    T, _, H = new.shape
    lanes = pages.shape[3]
    fold = fold_of(lanes, H)
    row, part = offset // fold, offset % fold
    merged = pages.at[page, :, row].get(mode="clip")  # [T, K, L]
    wide = jnp.pad(jnp.tile(new.astype(pages.dtype), (1, 1, fold)), _pad_lanes(lanes - fold * H))
    lane_part = jnp.arange(lanes) // H
    token = jnp.arange(T)
    for step in range(1 - fold, fold):
        other = jnp.clip(token + step, 0, T - 1)
        shares = (page[other] == page) & (row[other] == row)
        is_own = shares[:, None] & (lane_part == part[other][:, None])
        merged = jnp.where(is_own[:, None], wide[other], merged)
    return pages.at[page, :, row].set(merged, mode="drop")


def _pad_lanes(num: int):
    return ((0, 0), (0, 0), (0, num))
