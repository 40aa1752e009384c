"""Store a step's keys and values, then attend: what a layer does between its projections.

Two forms of one operator. Where the attention kernel writes the pages itself (TPU), it is given the
new keys and values; elsewhere `rope_and_write` stores them in one launch and the attention reads
them from their pages. Formula and layout: `api.py`.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from jaxinfer.kernels.attention_variant import AttentionVariant
from jaxinfer.kernels.dispatch import log_choice, preferred, sibling_in
from jaxinfer.kernels.kv_pages import KVPages, NewTokens
from jaxinfer.kernels.paged_attention import tpu
from jaxinfer.kernels.paged_attention.api import check_call, paged_attention
from jaxinfer.kernels.paged_attention.rows import RaggedRows
from jaxinfer.kernels.rope_and_write import BACKENDS, rope_and_write
from jaxinfer.kernels.rotary import Rotary, rotate

# Attention kernels that store the step's keys and values.
UPDATE_BACKENDS = {"tpu": tpu.update_and_attend}


def update_and_attend(
    q: Float[Array, "T N H"],
    new: NewTokens,
    rows: RaggedRows,
    pages: KVPages,
    variant: AttentionVariant,
    *,
    rotary: Rotary | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Float[Array, "T N values"], KVPages]:
    """Rotate queries and keys to their positions (`rotary`), store keys and values in their pages,
    and attend: (out, pages), the pages updated in place under donation.

    A token whose `new.page` is P or more is not stored, because a shared page holds it already;
    those of a row come before its others. Raises `ValueError` for shapes that do not fit together
    and `NoBackendError` where every backend, or the forced one, declines.
    """
    check_call(q, rows, pages, variant)
    if not batch_invariant and pages.v is not None:
        done = _in_one_kernel(q, new, rows, pages, variant, rotary, backend)
        if done is not None:
            return done
    writer = sibling_in(BACKENDS, backend)
    q, pages = rope_and_write(q, new, rotary, pages, backend=writer)
    out: Any = paged_attention(
        q, rows, pages, variant, batch_invariant=batch_invariant, backend=backend
    )
    return out, pages


def _in_one_kernel(
    q, new: NewTokens, rows: RaggedRows, pages: KVPages, variant: AttentionVariant,
    rotary: Rotary | None, backend: str | None,
):  # fmt: skip
    """Return (out, pages) by the kernel that stores and attends; None where the backend has no such
    kernel or it does not store pages like these. The same backend then takes both steps."""
    chosen = backend or preferred()[0]
    if chosen not in UPDATE_BACKENDS:
        return None
    if rotary is not None:
        q, new = rotate(q, *rotary), new._replace(k=rotate(new.k, *rotary))
    try:
        out, _, stored = UPDATE_BACKENDS[chosen](q, new, rows, pages, variant)
    except NotImplementedError as why:
        log_choice("update_and_attend", "rope_and_write and paged_attention", (f"{chosen}: {why}",))
        return None
    log_choice("update_and_attend", chosen, ())
    return out, stored
