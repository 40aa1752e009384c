"""Read float8 weights with a scale for each block, as in DeepSeek-V3 (arXiv:2412.19437)."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Shaped

from jaxinfer.loading.quantized.rows import QuantRows


def read_block_float8(
    weight: Shaped[np.ndarray, "out_dim in_dim"],
    scales: Float[np.ndarray, "row_blocks column_blocks"],
    block: tuple[int, int],
) -> QuantRows:
    """Read `w = weight * scale`, exactly, with one scale per block. Edge blocks may be partial.

    Scales are repeated over the rows of a block (4 bytes per 128 weights: 1.03 bytes per weight)
    and, if the last block of inputs is partial, over groups that divide the inputs. The model's
    original arithmetic also quantizes x by groups; here x is not quantized, which is more exact.
    """
    (out_dim, in_dim), (rows, columns) = weight.shape, block
    group = math.gcd(in_dim, columns)
    wide = np.repeat(scales.astype(np.float32), columns // group, axis=1)[:, : in_dim // group]
    return QuantRows(weight, np.repeat(wide, rows, axis=0)[:out_dim], None, 8)
