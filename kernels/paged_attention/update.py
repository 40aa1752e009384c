"""Store a step's keys and values, then attend: what a layer does between its projections.

Two forms of one operator. Where the attention kernel writes the pages itself (TPU), it is given the
new keys and values; elsewhere `rope_and_write` puts them in place in one launch and the attention
reads them from there. Formula and layout: `api.py`.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from jaxinfer.kernels.dispatch import preferred
from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention import tpu
from jaxinfer.kernels.paged_attention.api import check_call, paged_attention
from jaxinfer.kernels.rope_and_write import BACKENDS, rope_and_write
from jaxinfer.kernels.rotary import rotate

# Attention kernels that store the step's keys and values.
UPDATE_BACKENDS = {"tpu": tpu.update_and_attend}

Rotary = tuple[Float[Array, "T half"], Float[Array, "T half"]]  # cosines, sines


def update_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: KVPages,
    q_start: Int[Array, " R1"],
    kv_len: Int[Array, " R"],
    page_table: Int[Array, "R W"],
    write_page: Int[Array, " T"],
    write_cell: Int[Array, " T"],
    *,
    rotary: Rotary | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    value_dim: int | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Float[Array, "T N values"], KVPages]:
    """Turn queries and keys to their positions (`rotary`), store keys and values in their pages,
    and attend; the pages are updated in place under donation. Options as in `paged_attention`; no
    `v` for pages without values.

    A token whose `write_page` is P or more is not stored: a shared page holds it already. Those of
    a row come before its others. Raises `ValueError` for shapes that do not fit together.
    """
    variant: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    check_call(q, pages, q_start, kv_len, page_table, variant, value_dim)
    chosen = backend or preferred()[0]
    if chosen in UPDATE_BACKENDS and pages.v is not None and not batch_invariant:
        turn = (lambda x: x) if rotary is None else lambda x: rotate(x, *rotary)
        try:
            out, _, new_k, new_v = UPDATE_BACKENDS[chosen](
                turn(q), turn(k), v, pages.k, pages.v, q_start, kv_len, page_table, write_page,
                k_scales=pages.k_scales, v_scales=pages.v_scales, **variant,
            )  # fmt: skip
            return out, KVPages(new_k, new_v, pages.k_scales, pages.v_scales)
        except NotImplementedError:
            pass  # it does not store pages like these: one after the other, then
    cos, sin = rotary or (None, None)
    writer = backend if backend in BACKENDS else None  # no backend of that name: the best that fits
    q, pages = rope_and_write(q, k, v, cos, sin, pages, write_page, write_cell, backend=writer)
    out: Any = paged_attention(
        q, pages, q_start, kv_len, page_table, value_dim=value_dim,
        batch_invariant=batch_invariant, backend=backend, **variant,
    )  # fmt: skip
    return out, pages
