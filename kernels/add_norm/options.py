"""What a residual sum and norm is compiled for; formula: `api.py`."""

from __future__ import annotations

from typing import NamedTuple


class NormOptions(NamedTuple):
    """The static part of a call."""

    eps: float
    offset: float  # added to the weights of an RMSNorm
    is_centred: bool  # LayerNorm, not RMSNorm
    quantize: str | None  # the type that `normed` is quantized to
