"""float8 weights with a scale for each block, as DeepSeek-V3 stores them (arXiv:2412.19437)."""

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
    """`w = weight * scales` of its block; exact. Blocks at the edges may be cut.

    Scales are repeated over the rows of a block (4 bytes each 128 weights: 1.03 bytes a weight),
    and where the last block of inputs is cut, over groups that divide the inputs. The checkpoint's
    own arithmetic quantizes x by groups too; here x stays as it is, which is more exact.
    """
    (out_dim, in_dim), (rows, columns) = weight.shape, block
    group = math.gcd(in_dim, columns)
    wide = np.repeat(scales.astype(np.float32), columns // group, axis=1)[:, : in_dim // group]
    return QuantRows(weight, np.repeat(wide, rows, axis=0)[:out_dim], None, 8)
