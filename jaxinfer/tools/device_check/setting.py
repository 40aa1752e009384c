"""The module search path and the environment of the device check's and the tuner's children."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def search_path(packages: str | None) -> Iterator[list[str]]:
    """Folders that this process and its children search for modules besides the usual ones.

    This process only plans, so its JAX leaves the device and its memory to the children.
    """
    folders = [str(Path(packages).resolve())] if packages else []
    sys.path[1:1] = folders
    import jax

    jax.config.update("jax_platforms", "cpu")
    yield folders


def environment(folders: list[str], *, rehearse: bool) -> dict[str, str | None]:
    """The environment of the children; no process preallocates the device's memory."""
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    # A rehearsal runs each program a few times only, so a quick compile is faster overall.
    hasty = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    return {
        "XLA_FLAGS": hasty.strip() if rehearse else os.environ.get("XLA_FLAGS"),
        "PYTHONPATH": path,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_PLATFORMS": "cpu" if rehearse else os.environ.get("JAX_PLATFORMS"),
        "TRITON_INTERPRET": "1" if rehearse else None,
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
