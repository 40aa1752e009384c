"""The memory plan: how many pages fit into what the weights and a step's temporaries leave."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from jaxinfer.config import CacheConfig
from jaxinfer.options import ConfigError

# The share of the free memory that pages take unless `cache.memory_fraction` is set. A tenth of an
# accelerator's is left for fragmentation; a CPU's memory serves other programs too.
DEVICE_FRACTION = 0.9
HOST_FRACTION = 0.2


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device, and the pages that they make room for."""

    weight_bytes: int
    temporary_bytes: int  # of the largest step, as the compiler reports it
    page_bytes: int  # one page over all layers, keys and values
    num_pages: int
    page_size: int
    source: str  # what the number of pages comes from

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of cache."""
        return self.num_pages * self.page_size


def device_limit(device: Any) -> int | None:
    """Bytes that the device's allocator may hand out, or None if it does not say."""
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and stats.get("bytes_limit") else None


def bytes_per_device(array: Any) -> int:
    """The bytes that each device holds of an array, or of an abstract one with a sharding."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def free_host_bytes() -> int:
    """The memory that the operating system can give to this process without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the total is the best figure that the standard library has
    return total_host_bytes()


def total_host_bytes() -> int:
    """The host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_pages(
    cache: CacheConfig,
    *,
    weight_bytes: int,
    temporary_bytes: int,
    page_bytes: int,
    min_tokens: int,
    max_tokens: int,
    limit: int | None,
    num_on_host: int = 1,
) -> MemoryPlan:
    """Decide the number of pages.

    `cache.num_pages` or `cache.memory_bytes` decide if they are set. Otherwise pages take
    `cache.memory_fraction` of what weights and temporaries leave of a device's `limit`, or of the
    host's free memory, which `num_on_host` devices share. There are at most the pages that
    `max_tokens` tokens (all rows at full length) can fill. Raises `ConfigError` if `min_tokens`
    tokens (one short request) do not fit.
    """
    max_pages = -(-max_tokens // cache.page_size)
    fraction = cache.memory_fraction
    if cache.num_pages is not None:
        num_pages, source = cache.num_pages, "cache.num_pages"
    elif cache.memory_bytes is not None:
        num_pages, source = cache.memory_bytes // page_bytes, "cache.memory_bytes"
    elif limit is not None:
        left = max(0, limit - weight_bytes - temporary_bytes)
        fraction = DEVICE_FRACTION if fraction is None else fraction
        num_pages = int(left * fraction) // page_bytes
        source = f"{fraction * 100:g} % of what weights and temporaries leave of {limit:,} bytes"
    else:
        free = free_host_bytes()
        fraction = HOST_FRACTION if fraction is None else fraction
        num_pages = int(free * fraction / num_on_host) // page_bytes
        source = f"{fraction:.0%} of the host's {free:,} free bytes"
    if cache.num_pages is None and cache.memory_bytes is None and num_pages >= max_pages:
        num_pages, source = max_pages, f"as many as requests can fill, {max_tokens:,} tokens"
    if num_pages * cache.page_size < min_tokens:
        raise ConfigError(
            f"the cache would hold {max(num_pages, 0)} pages of {cache.page_size} tokens "
            f"({source}), less than one request of {min_tokens} tokens needs; set cache.num_pages "
            "or cache.memory_bytes higher, or use a smaller model or dtype"
        )
    return MemoryPlan(weight_bytes, temporary_bytes, page_bytes, num_pages, cache.page_size, source)
