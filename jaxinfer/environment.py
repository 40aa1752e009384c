"""The one place that reads the process's environment: where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """The project's folder in the user's cache: in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer"
