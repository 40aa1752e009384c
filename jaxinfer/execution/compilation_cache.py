"""JAX's persistent compilation cache, in the user's cache folder."""

from __future__ import annotations

import jax

from jaxinfer.environment import cache_home

MAX_BYTES = 8 * 2**30  # oldest entries go first


def enable() -> None:
    """Keep compiled programs between processes, unless the caller has chosen a folder already
    (`jax.config`, or JAX's own environment variable JAX_COMPILATION_CACHE_DIR)."""
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
    # With a size limit jax locks the folder; without one, a process may read what another has half
    # written, and XLA ends the process over it (seen with jax 0.10.2).
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    # A step takes seconds to compile, admission a tenth of one: keep both.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
