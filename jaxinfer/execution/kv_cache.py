"""The KV cache on the device: how its pages are laid out, allocated and measured.

Pages are preallocated: an array of keys for each layer, and mostly one of values
(`kernels/kv_pages.py`). Which request owns which page is the host's business (`engine/pages.py`);
here a page is a number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.folding import LANES, rows_and_lanes
from jaxinfer.kernels.kv_pages import KVPages, is_quantized
from jaxinfer.nn.ragged import CacheShape
from jaxinfer.options import ConfigError


def page_layout(page_size: int, head_dim: int) -> tuple[int, int]:
    """Rows and lanes of a page: B and H, but folded on a TPU whose lanes H would not fill."""
    return rows_and_lanes(page_size, head_dim) if platform() == "tpu" else (page_size, head_dim)


def check_layout(page_size: int, dtype, parts: int = 1) -> None:
    """Raises `ConfigError` for pages, each over so many devices in `parts`, that the platform
    would copy at every step."""
    if platform() == "tpu" and is_quantized(dtype) and page_size % (LANES * parts):
        of_seq = f", over mesh.seq {parts}" if parts > 1 else ""
        raise ConfigError(
            f"cache.dtype is {jnp.dtype(dtype).name} and cache.page_size {page_size}{of_seq}: on a "
            f"TPU it must be a multiple of {LANES * parts}, or XLA lays out the pages' scales "
            "otherwise than the kernel reads them, and copies all of them in every layer"
        )


def allocate(cache: CacheShape, *, num_pages: int, page_size: int, dtype) -> tuple[KVPages, ...]:
    """Zeroed pages of every layer, with scales where the type is a quantized one."""
    shape = (num_pages, cache.num_kv_heads, *page_layout(page_size, cache.head_dim))
    scales = (num_pages, cache.num_kv_heads, page_size) if is_quantized(dtype) else None

    def layer() -> KVPages:
        stored = lambda: jnp.zeros(shape, dtype)
        factors = lambda: jnp.ones(scales, jnp.float32) if scales else None
        if cache.value_dim is not None:
            return KVPages(stored(), None, factors())
        return KVPages(stored(), stored(), factors(), factors())

    return tuple(layer() for _ in range(cache.num_layers))


def page_bytes(cache: CacheShape, *, page_size: int, dtype) -> int:
    """Bytes that one page takes over all layers: keys, values and their scales."""
    one = jax.eval_shape(lambda: allocate(cache, num_pages=1, page_size=page_size, dtype=dtype))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one))
