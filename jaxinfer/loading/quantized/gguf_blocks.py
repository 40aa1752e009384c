"""Read the block-quantized GGUF types that stay packed: Q8_0, Q4_0, Q4_1, Q4_K, Q6_K and MXFP4.

A row of a tensor is a sequence of blocks, each with its scales. The types are read as:

    type   weights per block, groups    values    bytes per weight   in the file
    Q8_0   32, one of 32                int8      1.06               1.06
    Q4_0   32, one of 32                4 bits    0.56               0.56
    Q4_1   32, one of 32, minimum       4 bits    0.63               0.63
    Q4_K   256, 8 of 32, minimum        4 bits    0.63               0.56
    Q6_K   256, 16 of 16                int8      1.13               0.82
    MXFP4  32, one of 32                int8      1.06               0.53

Q8_0, Q4_0 and MXFP4 are read exactly. Scales are float16 (bfloat16 for MXFP4). In the K types a
scale is the product of two numbers, which is rounded to float16: a relative error of 2 ** -11. A
minimum becomes a zero point (`rows.from_minimum`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import UInt8

from jaxinfer.loading.mxfp4 import DOUBLED, half_scales
from jaxinfer.loading.quantized.rows import CHUNK_ELEMENTS, QuantRows, from_minimum

Raw = UInt8[np.ndarray, "rows blocks size"]


def read_blocks(raw: np.ndarray, shape: tuple[int, ...], kind: str) -> QuantRows:
    """Read the tensor of `shape` [*E, out, in] from its bytes; `kind` is a key of `READERS`.

    It is read in strips of rows, because the temporaries of the K types take 4 bytes per weight.
    """
    *lead, num_columns = shape
    block, size = BLOCKS[kind]
    blocks = raw.reshape(-1, num_columns // block, size)
    step = max(1, CHUNK_ELEMENTS // num_columns)
    whole: list[np.ndarray | None] = []
    bits = 8
    for start in range(0, len(blocks), step):
        part = READERS[kind](blocks[start : start + step])
        bits, num_rows = part.bits, min(step, len(blocks) - start)
        by_rows = [
            None if a is None else a.reshape(num_rows, -1)
            for a in (part.values, part.scales, part.zeros)
        ]
        if not whole:
            whole = [
                None if a is None else np.empty((len(blocks), a.shape[1]), a.dtype) for a in by_rows
            ]
        for target, source in zip(whole, by_rows, strict=True):
            if target is not None:
                target[start : start + step] = source
    values, scales, zeros = (None if a is None else a.reshape(*lead, -1) for a in whole)
    assert values is not None and scales is not None
    return QuantRows(values, scales, zeros, bits)


def _half(raw: Raw, at: int) -> np.ndarray:
    """Read the float16 at byte `at` of each block."""
    return raw[..., at : at + 2].copy().view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray, dtype=np.uint8) -> np.ndarray:
    """Unpack bytes [..., n] to values [..., 2 n]: all low halves, then all high halves."""
    both = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), dtype)
    np.bitwise_and(packed, 15, out=both[..., 0, :])
    np.right_shift(packed, 4, out=both[..., 1, :])
    return both.reshape(*packed.shape[:-1], -1)


def _q8_0(raw: Raw) -> QuantRows:
    """A block has a float16 scale and 32 int8."""
    return QuantRows(raw[..., 2:].view(np.int8), _half(raw, 0), None, 8)


def _q4_0(raw: Raw) -> QuantRows:
    """A block has a float16 scale and 32 4-bit values with zero point 8."""
    return QuantRows(_nibbles(raw[..., 2:]), _half(raw, 0), None, 4)


def _q4_1(raw: Raw) -> QuantRows:
    """A block has a float16 scale, a float16 minimum and 32 4-bit values."""
    scale, minimum = (_half(raw, at).astype(np.float32) for at in (0, 2))
    return from_minimum(_nibbles(raw[..., 4:]), scale, minimum, 4)


def _q4_k(raw: Raw) -> QuantRows:
    """A block has 8 groups of 32 4-bit values.

    It begins with a float16 scale of the scales, a float16 scale of the minima, and 12 bytes of 8
    scales and 8 minima of 6 bits each. Then come 4 runs of 64 values, in each of which 32 values
    are in the low halves of the bytes and 32 in the high halves.
    """
    scale, minimum = (_half(raw, at).astype(np.float32)[..., None] for at in (0, 2))
    first, second, third = (raw[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    values = _nibbles(raw[..., 16:].reshape(*raw.shape[:-1], 4, 32))
    return from_minimum(values.reshape(*raw.shape[:-1], 256), scale * scales, -minimum * minima, 4)


def _q6_k(raw: Raw) -> QuantRows:
    """A block has 16 groups of 16 6-bit values.

    It has 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 int8 scales, and their float16
    scale. Each half of the block has four runs of 32 values; their low bits are in two runs of 32
    bytes (low halves, then high halves), their high bits in one (from the lowest two bits up).
    """
    low = _nibbles(raw[..., :128].reshape(*raw.shape[:-1], 2, 64))
    high = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = low.reshape(*raw.shape[:-1], 2, 4, 32) | high << 4
    scales = raw[..., 192:208].view(np.int8) * _half(raw, 208).astype(np.float32)[..., None]
    values = values.view(np.int8).reshape(*raw.shape[:-1], 256) - np.int8(32)
    with np.errstate(over="ignore"):  # loading reports the weights that are not finite
        return QuantRows(values, scales.astype(np.float16), None, 8)


def _mxfp4(raw: Raw) -> QuantRows:
    """A block has a power of two (e8m0) and 32 4-bit numbers (e2m1; see `loading/mxfp4.py`)."""
    return QuantRows(DOUBLED[_nibbles(raw[..., 1:])], half_scales(raw[..., 0]), None, 8)


# Weights and bytes in a block.
BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
READERS: Mapping[str, Callable[[Raw], QuantRows]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
