"""The ragged batch that paged attention works on."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Int


class RaggedRows(NamedTuple):
    """R rows (requests) whose query tokens lie one row after another (R1 is R + 1).

    Row r brings tokens `q_start[r]` to `q_start[r + 1]`, the last ones of its `kv_len[r]` tokens;
    `page_table[r]` lists its pages in order of position. With `key_limit`, a row's keys at that
    position and later are not seen, whatever the query's position is.
    """

    q_start: Int[Array, " R1"]
    kv_len: Int[Array, " R"]
    page_table: Int[Array, "R W"]
    key_limit: Int[Array, " R"] | None = None
