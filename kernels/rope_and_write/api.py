"""Rotary embedding and cache write: signature, formula, contract and checks.

What stands between a layer's projections and its attention: queries and keys are rotated to their
positions, then keys and values go into the paged cache, quantized where the pages are. In one
launch each number is read once and written once; in separate launches, the rotated keys are
written, read, divided by their scales, written, read and stored.

    rotated[i]        = x[i] cos[i] - x[i + half] sin[i]      for i < half, in float32
    rotated[i + half] = x[i + half] cos[i] + x[i] sin[i]      (RoFormer, arXiv:2104.09864)
    rotated[j]        = x[j]                                  for j >= 2 half (partial rotary)

`rotated` is rounded to x's type, and what is stored is that, rounded to the pages' type. Layout and
scales: `kv_pages.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.kernels.dispatch import dispatch
from jaxinfer.kernels.folding import fold_of
from jaxinfer.kernels.kv_pages import KVPages, NewTokens, is_quantized
from jaxinfer.kernels.rope_and_write import gpu, reference, tpu, xla
from jaxinfer.kernels.rotary import Rotary

BACKENDS = {
    "reference": reference.rope_and_write,
    "xla": xla.rope_and_write,
    "tpu": tpu.rope_and_write,
    "gpu": gpu.rope_and_write,
}


def rope_and_write(
    q: Float[Array, "T N H"],
    new: NewTokens,
    rotary: Rotary | None,
    pages: KVPages,
    *,
    backend: str | None = None,
) -> tuple[Float[Array, "T N H"], KVPages]:
    """Return the rotated queries, and the pages with the new keys (rotated) and values in them.

    No two stored tokens may share a slot, and those of one page lie one after another, as a row's
    do. In place when the caller's jit donates `pages`. Without `rotary` nothing is rotated. Raises
    `ValueError` for shapes and types that do not fit together and `NoBackendError` where every
    backend, or the forced one, declines.
    """
    _check_rotary(q, rotary)
    _check_pages(new, pages)
    k, _, page, offset = new
    if not page.shape[0] == offset.shape[0] == q.shape[0] == k.shape[0]:
        raise ValueError(
            f"tokens differ: q has {q.shape[0]}, k {k.shape[0]}, page {page.shape[0]}, "
            f"offset {offset.shape[0]}"
        )
    return dispatch("rope_and_write", BACKENDS, backend, q, new, rotary, pages)


def _check_rotary(q, rotary: Rotary | None) -> None:
    if rotary is None:
        return
    cos, sin = rotary
    if cos.shape != sin.shape:
        raise ValueError(f"cos {cos.shape} and sin {sin.shape} differ in shape")
    if not 0 < 2 * cos.shape[1] <= q.shape[2]:
        raise ValueError(
            f"cos has {cos.shape[1]} angles; heads of {q.shape[2]} take 1 to {q.shape[2] // 2}"
        )


def _check_pages(new: NewTokens, pages: KVPages) -> None:
    k, v = new.k, new.v
    if (v is None) != (pages.v is None):
        has = "no values" if v is None else "values"
        raise ValueError(f"{has} for pages {'without' if pages.v is None else 'with'} them")
    if v is not None and k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ in shape")
    if pages.v is not None and (pages.k.shape, pages.k.dtype) != (pages.v.shape, pages.v.dtype):
        raise ValueError(
            f"pages of keys are {pages.k.dtype} {pages.k.shape}, of values "
            f"{pages.v.dtype} {pages.v.shape}; they must be alike"
        )
    if pages.k.shape[1] != k.shape[1] or not fold_of(pages.k.shape[3], k.shape[2]):
        raise ValueError(
            f"k has {k.shape[1]} heads of {k.shape[2]}; pages {pages.k.shape} hold others"
        )
    fold = fold_of(pages.k.shape[3], k.shape[2])
    scales_shape = (*pages.k.shape[:2], pages.k.shape[2] * fold)
    parts = (("k_scales", pages.k, pages.k_scales), ("v_scales", pages.v, pages.v_scales))
    for name, stored, scales in parts:
        if (scales is not None) != (stored is not None and is_quantized(pages.k.dtype)):
            needs = "need" if scales is None else "have no"
            raise ValueError(f"{pages.k.dtype} pages {needs} {name}")
        if scales is not None and (scales.shape, scales.dtype) != (scales_shape, jnp.float32):
            raise ValueError(
                f"{name} is {scales.dtype} {scales.shape}; it must be float32 {scales_shape}"
            )
