"""JAX's persistent compilation cache, in the user's cache folder.

The one place that reads the environment: XDG_CACHE_HOME, and JAX_COMPILATION_CACHE_DIR, which
(like a value set through `jax.config`) wins over the default given here.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax


def cache_home() -> Path:
    """The folder of everything that jaxinfer keeps for later: `$XDG_CACHE_HOME/jaxinfer`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer"


def enable() -> None:
    """Keep compiled programs between processes, unless the caller has chosen a folder already."""
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
    # A step takes seconds to compile, admission a tenth of one: keep both.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
