"""Attention over the paged cache, which is whole on one device or split over several."""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxinfer.kernels.kv_pages import KVPages, NewTokens
from jaxinfer.kernels.paged_attention import AttentionVariant, RaggedRows
from jaxinfer.kernels.paged_attention.update import update_and_attend
from jaxinfer.kernels.rotary import Rotary
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.ragged import RaggedBatch
from jaxinfer.sharding.sequence import SplitRows, sequence_attention


def attend_to_cache(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    batch: RaggedBatch,
    pages: KVPages,
    variant: AttentionVariant,
    numerics: Numerics,
    *,
    rotary: Rotary | None = None,
) -> tuple[Float[Array, "T N values"], KVPages]:
    """Apply RoPE to queries and keys, store keys and values in their pages, and attend over each
    row's pages. `v` is None if `variant` takes values from the keys."""
    new = NewTokens(k, v, batch.write_page, batch.write_offset)
    backend = numerics.attention_backend
    if numerics.layout.axes("page_offset"):
        step = SplitRows(batch.rows, batch.split, numerics.layout)
        return sequence_attention(q, new, step, pages, variant, rotary=rotary, backend=backend)
    return update_and_attend(
        q,
        new,
        RaggedRows(batch.q_start, batch.kv_len, batch.page_table),
        pages,
        variant,
        rotary=rotary,
        batch_invariant=numerics.batch_invariant,
        backend=backend,
    )
