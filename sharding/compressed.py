"""An all-reduce that sends int8 in place of floats.

Each device cuts its array into one part per device, quantizes the parts, and sends each device its
part. A device sums the parts that it received in float32, quantizes the sum, and sends it to all
(quantized collectives: ZeRO++, arXiv:2306.10209, section 4; EQuARX, arXiv:2506.17615, for XLA).
Values are quantized twice, whatever the number of devices; a ring would quantize at every hop.

It pays off with slow links and many tokens. It takes 7 launches and 3 messages on an H100, 24 and 4
on a v5e (compiled for [2048, 4096] in bfloat16); the exact sum takes one message.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8

from jaxinfer.sharding.collectives import Axes

BLOCK = 128  # values that share a scale: the lanes of a TPU
INT8_MAX = 127
SCALE_BYTES = 4  # float32


def compressed_sum(x: Float[Array, "T D"], axes: Axes) -> Float[Array, "T D"]:
    """Approximate `collectives.all_sum(x, axes)`; the result has the same bits on all devices.

    Each of n devices sends 2 (n - 1) / n T D (1 + 4 / 128) bytes. The exact sum sends
    2 (n - 1) / n T D values, so this is 0.52 of its bytes for bfloat16 and 0.26 for float32. (D is
    padded to n times a whole number of blocks of at most 128; `sent_bytes` is exact.)

    The error of an element is at most 1/126 of the sum, over the devices, of the largest |x| in its
    block: half a quantization step of each device's block (1/254 of its largest |x|) and half a
    step of the sum's block. For normally distributed float32 [16, 4096], ||error|| / ||sum|| is
    0.0092 on 2, 4 and 8 devices. A token's result does not depend on the other tokens. If a block
    has an element that is not finite, none of its results is finite.
    """
    if not axes:
        return x
    T, D = x.shape
    n = lax.axis_size(axes)
    num_blocks, block = _blocks(D, n)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, n * num_blocks * block - D)))
    parts = padded.reshape(T, n, -1).swapaxes(0, 1)  # [n, T, part]
    send = lambda a: lax.all_to_all(a, axes, split_axis=0, concat_axis=0, tiled=True)
    part_sum = _dequantize(*map(send, _quantize(parts, num_blocks))).sum(axis=0)  # [T, part]
    gather = lambda a: lax.all_gather(a, axes)
    sums = _dequantize(*map(gather, _quantize(part_sum, num_blocks)))
    return sums.swapaxes(0, 1).reshape(T, -1)[:, :D].astype(x.dtype)


def sent_bytes(num_tokens: int, dim: int, num_devices: int) -> int:
    """Return the bytes that a device sends in a `compressed_sum` of [num_tokens, dim]."""
    num_blocks, block = _blocks(dim, num_devices)
    return 2 * (num_devices - 1) * num_tokens * num_blocks * (block + SCALE_BYTES)


def _blocks(dim: int, num_devices: int) -> tuple[int, int]:
    """Return the number of blocks in a device's part of `dim` values, and the values per block."""
    part = -(-dim // num_devices)
    num_blocks = -(-part // BLOCK)
    return num_blocks, -(-part // num_blocks)


def _quantize(
    x: Float[Array, "*rows part"], num_blocks: int
) -> tuple[Int8[Array, "*rows part"], Float[Array, "*rows blocks"]]:
    blocks = x.reshape(*x.shape[:-1], num_blocks, -1)
    scale = jnp.abs(blocks).max(axis=-1) / INT8_MAX
    steps = blocks * jnp.where(scale > 0, 1 / scale, 0)[..., None]  # a block of zeros has scale 0
    return jnp.rint(steps).astype(jnp.int8).reshape(x.shape), scale


def _dequantize(
    values: Int8[Array, "*rows part"], scale: Float[Array, "*rows blocks"]
) -> Float[Array, "*rows part"]:
    blocks = values.reshape(*scale.shape, -1).astype(jnp.float32)
    return (blocks * scale[..., None]).reshape(values.shape)
