"""MXFP4, the experts' format of gpt-oss: groups of 32 numbers of 4 bits that share a power of two.

(OCP Microscaling Formats, version 1.0.) A number is e2m1: a sign, two bits of exponent and one of
mantissa, so its magnitude is one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A group's scale is e8m0: the
power of two `2 ** (byte - 127)`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import UInt8

from jaxinfer.loading.quantized.rows import CHUNK_ELEMENTS, QuantRows

GROUP = 32
BIAS = 127
# Twice the values of the codes 0..15, which makes whole numbers of them.
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def half_scales(scales: UInt8[np.ndarray, "*groups"]) -> np.ndarray:
    """Half of each power of two, bfloat16, for values that are doubled. A byte of 255 means NaN."""
    halves = np.exp2(scales.astype(np.float32) - (BIAS + 1))
    halves[scales == 255] = np.nan
    return halves.astype(ml_dtypes.bfloat16)


def read_mxfp4(
    blocks: UInt8[np.ndarray, "E out_dim groups 16"], scales: UInt8[np.ndarray, "E out_dim groups"]
) -> QuantRows:
    """[E, in, out], exactly: int8 values, twice the numbers, and half their scales, bfloat16, which
    has the same exponents. 1.06 bytes a weight, where the file has 0.53.

    A byte holds two neighbours of a row, the first in its low half.
    """
    E, out_dim, groups = scales.shape
    values = np.empty((E, out_dim, groups, GROUP // 2, 2), np.int8)
    pairs, by_rows = blocks.reshape(-1, groups, GROUP // 2), values.reshape(-1, *values.shape[2:])
    step = max(1, CHUNK_ELEMENTS // (GROUP * groups))
    for start in range(0, len(pairs), step):  # a strip: its indices take 8 bytes each
        strip = slice(start, start + step)
        by_rows[strip, ..., 0] = DOUBLED[pairs[strip] & 15]
        by_rows[strip, ..., 1] = DOUBLED[pairs[strip] >> 4]
    turned = lambda a: a.reshape(E, out_dim, -1).swapaxes(-1, -2)
    return QuantRows(turned(values), turned(half_scales(scales)), None, 8, in_axis=-2)
