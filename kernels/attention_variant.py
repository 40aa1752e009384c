"""The options that change an attention score, common to paged and dense attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

_static: Any = {"metadata": {"static": True}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionVariant:
    """How scores become weights; the formula is in each operator's `api.py`.

    A pytree: a program is compiled for the numbers, the arrays are its inputs.
    """

    scale: float = dataclasses.field(**_static)
    window: int | None = dataclasses.field(default=None, **_static)  # None: no window
    soft_cap: float | None = dataclasses.field(default=None, **_static)  # None: no cap
    # Values are the first `value_dim` numbers of the keys; None: values have pages of their own.
    value_dim: int | None = dataclasses.field(default=None, **_static)
    sinks: Any = None  # float [N]
    alibi_slopes: Any = None  # float [N]

    def check(self, num_heads: int) -> None:
        """Raise `ValueError` for options out of range and arrays of another shape than [N]."""
        for name in ("sinks", "alibi_slopes"):
            per_head = getattr(self, name)
            if per_head is not None and per_head.shape != (num_heads,):
                raise ValueError(f"{name} has shape {per_head.shape}; it must be ({num_heads},)")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 (None: no window)")
        if self.soft_cap is not None and not 0 < self.soft_cap < float("inf"):
            raise ValueError(
                f"soft_cap is {self.soft_cap}; it must be above 0 and finite (None: no cap)"
            )
