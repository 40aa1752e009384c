"""Read AWQ and GPTQ weights: 4- or 8-bit integers packed in int32, with scales and zero points.

For a linear layer X with D inputs, F outputs, groups of g inputs and p = 32 / bits values in an
int32, their files have:

    AWQ   X.qweight [D, F / p]   X.qzeros [D / g, F / p]   X.scales [D / g, F]
    GPTQ  X.qweight [D / p, F]   X.qzeros [D / g, F / p]   X.scales [D / g, F]   X.g_idx [D]

    w[d, f] = (q[d, f] - zero[j, f]) * scales[j, f]      j = d // g, or g_idx[d]

AWQ (arXiv:2306.00978) packs the columns of an int32 in the order `AWQ_ORDER`, lowest bits first.
GPTQ (arXiv:2210.17323) with act-order assigns inputs to groups in any order: they are sorted by
group here, and x is put in the same order before the matmul. All conversions are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxinfer.loading.quantized.rows import (
    CHUNK_ELEMENTS,
    QuantRows,
    drop_default_zeros,
    input_order,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_integers(
    packed: Int[np.ndarray, "*lead words"], bits: int, order: tuple[int, ...] | None = None
) -> np.ndarray:
    """Unpack to uint8 [*lead, words * 32 / bits], from the lowest bits up.

    If `order` is given, value i of each word goes to position `order[i]`.
    """
    count = 32 // bits
    words = packed.reshape(-1).view(np.uint32)
    out = np.empty((len(words), count), np.uint8)
    for start in range(0, len(words), CHUNK_ELEMENTS):  # in strips: shifted words take 4 bytes
        strip = slice(start, start + CHUNK_ELEMENTS)
        for i in range(count):
            out[strip, i if order is None else order[i]] = words[strip] >> (bits * i) & (
                2**bits - 1
            )
    return out.reshape(*packed.shape[:-1], -1)


def read_awq(
    qweight: Int[np.ndarray, "D words"],
    qzeros: Int[np.ndarray, "groups words"],
    scales: Float[np.ndarray, "groups F"],
) -> QuantRows:
    """Read an AWQ weight of version "gemm", 4 bits."""
    values = unpack_integers(qweight, 4, AWQ_ORDER)
    zeros = unpack_integers(qzeros, 4, AWQ_ORDER)
    return _by_rows(values, scales, zeros, 4)


def read_gptq(
    qweight: Int[np.ndarray, "words F"],
    qzeros: Int[np.ndarray, "groups zero_words"],
    scales: Float[np.ndarray, "groups F"],
    g_idx: Int[np.ndarray, " D"] | None,
    *,
    bits: int,
    is_first_version: bool,
) -> QuantRows:
    """Read a GPTQ weight.

    `is_first_version` is the checkpoint format "gptq", which stores zero points minus one. Raises
    `ValueError` for groups of different sizes.
    """
    values = unpack_integers(np.ascontiguousarray(qweight.T), bits).T  # [D, F]
    zeros = unpack_integers(qzeros, bits).astype(np.int16) + int(is_first_version)
    order = None if g_idx is None else input_order(g_idx, len(scales))
    if order is not None:
        values = values[order]
    return _by_rows(values, scales, zeros, bits, order)


def _by_rows(values, scales, zeros, bits: int, order: Any = None) -> QuantRows:
    """Transpose to rows; 8-bit values and zeros are shifted by -128, from uint8 to int8."""
    if bits == 8:
        values, zeros = (values ^ 128).view(np.int8), zeros.astype(np.int16) - 128
    zeros = drop_default_zeros(zeros, default=8 if bits == 4 else 0)
    zeros = None if zeros is None else zeros.astype(scales.dtype).T
    return QuantRows(values.T, scales.T, zeros, bits, order=order)
