"""What the variants of attention take, paged or not."""

from __future__ import annotations


def check_variant(num_heads, window, soft_cap, sinks, alibi_slopes) -> None:
    """Raises `ValueError` for options out of range and arrays that are not one number a head."""
    for name, of_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if of_head is not None and of_head.shape != (num_heads,):
            raise ValueError(f"{name} has shape {of_head.shape}; it must be ({num_heads},)")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 (None: no window)")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap is {soft_cap}; it must be above 0 and finite (None: no cap)")
