"""Read MXFP4, the format of gpt-oss's experts: groups of 32 4-bit numbers with a common scale.

The format is that of the OCP Microscaling Formats specification, version 1.0. A number is e2m1: a
sign, two bits of exponent and one of mantissa, so its magnitude is one of 0, 0.5, 1, 1.5, 2, 3, 4
and 6. A group's scale is e8m0: the power of two `2 ** (byte - 127)`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import UInt8

from jaxinfer.loading.quantized.rows import CHUNK_ELEMENTS, QuantRows

GROUP = 32
BIAS = 127
# The values of the codes 0..15, doubled so that they are integers.
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def half_scales(scales: UInt8[np.ndarray, "*groups"]) -> np.ndarray:
    """Return half of each scale, bfloat16, for the doubled values. A byte of 255 means NaN."""
    halves = np.exp2(scales.astype(np.float32) - (BIAS + 1))
    halves[scales == 255] = np.nan
    return halves.astype(ml_dtypes.bfloat16)


def read_mxfp4(
    blocks: UInt8[np.ndarray, "E out_dim groups 16"], scales: UInt8[np.ndarray, "E out_dim groups"]
) -> QuantRows:
    """Read a weight [E, in, out], exactly: the doubled numbers as int8, and half their scales.

    The scales are bfloat16, which has the same exponents as e8m0. The result takes 1.06 bytes per
    weight, the file 0.53. A byte has two neighbours of a row, the first in its low half.
    """
    E, out_dim, groups = scales.shape
    values = np.empty((E, out_dim, groups, GROUP // 2, 2), np.int8)
    pairs, by_rows = blocks.reshape(-1, groups, GROUP // 2), values.reshape(-1, *values.shape[2:])
    step = max(1, CHUNK_ELEMENTS // (GROUP * groups))
    for start in range(0, len(pairs), step):  # in strips: the indices take 8 bytes each
        strip = slice(start, start + step)
        by_rows[strip, ..., 0] = DOUBLED[pairs[strip] & 15]
        by_rows[strip, ..., 1] = DOUBLED[pairs[strip] >> 4]
    transpose = lambda a: a.reshape(E, out_dim, -1).swapaxes(-1, -2)
    return QuantRows(transpose(values), transpose(half_scales(scales)), None, 8, in_axis=-2)
