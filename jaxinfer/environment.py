"""The one place that reads the process's environment: where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """jaxinfer's folder in the user's cache: `$XDG_CACHE_HOME/jaxinfer`, else `~/.cache/jaxinfer`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer"
