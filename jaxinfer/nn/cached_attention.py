"""What attention does with its rows' cache, whole on one device or split over several."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from jaxinfer.kernels.kv_pages import KVPages
from jaxinfer.kernels.paged_attention.update import Rotary, update_and_attend
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.ragged import RaggedBatch
from jaxinfer.sharding.sequence import attend_to_parts


def attend_to_cache(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    batch: RaggedBatch,
    pages: KVPages,
    numerics: Numerics,
    *,
    rotary: Rotary | None = None,
    **variant: Any,
) -> tuple[Float[Array, "T N values"], KVPages]:
    """Turn queries and keys to their positions, store keys and values in their pages, attend over
    each row's pages. `variant`: the other options of `kernels/paged_attention/update.py`."""
    variant["backend"] = numerics.attention_backend
    if numerics.layout.axes("cell"):
        return attend_to_parts(
            q, k, v, pages, batch.rows, batch.split, (batch.write_page, batch.write_offset),
            numerics.layout, rotary=rotary, **variant,
        )  # fmt: skip
    return update_and_attend(
        q,
        k,
        v,
        pages,
        batch.q_start,
        batch.kv_len,
        batch.page_table,
        batch.write_page,
        batch.write_offset,
        rotary=rotary,
        batch_invariant=numerics.batch_invariant,
        **variant,
    )
