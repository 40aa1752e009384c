"""JAX's persistent compilation cache, in the user's cache folder."""

from __future__ import annotations

import jax

from jaxinfer.environment import cache_home

MAX_BYTES = 8 * 2**30  # past it, the oldest entries are deleted


def enable() -> None:
    """Keep compiled programs between processes.

    Does nothing if the caller has chosen a folder already, in `jax.config` or by JAX's environment
    variable JAX_COMPILATION_CACHE_DIR.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
    # jax locks the folder only if it has a size limit. Without the lock a process may read an entry
    # that another has half written, and XLA aborts the process (jax 0.10.2).
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    # A step takes seconds to compile and admission a tenth of a second: keep both.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
