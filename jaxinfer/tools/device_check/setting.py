"""Where the children of the device check and of the tuner find their modules and their device."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent


def source_links(folder: Path) -> Path:
    """A folder that holds `jaxinfer` as a wheel does, by links, for where it is not installed."""
    package = folder / "jaxinfer"
    package.mkdir()
    for path in (ROOT / "jaxinfer").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("kernels", "configs", "serving", "sharding"):
        (package / name).symlink_to(ROOT / name)
    return folder


@contextlib.contextmanager
def search_path(packages: str | None) -> Iterator[list[str]]:
    """Folders that this process and its children look for modules in, beside the usual ones.

    This process only plans: JAX in it is told to leave the device and its memory to the children.
    """
    with tempfile.TemporaryDirectory() as name:
        folders: list[str] = []
        if packages:
            folders.append(str(Path(packages).resolve()))
        if importlib.util.find_spec("jaxinfer") is None:
            folders.append(str(source_links(Path(name))))
        sys.path[1:1] = folders
        import jax

        jax.config.update("jax_platforms", "cpu")
        yield folders


def environment(folders: list[str], *, rehearse: bool) -> dict[str, str | None]:
    """Of the children: one process does not take all of the memory from the next."""
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    # A rehearsal runs each program a few times: compiled in haste it is sooner done.
    hasty = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    return {
        "XLA_FLAGS": hasty.strip() if rehearse else os.environ.get("XLA_FLAGS"),
        "PYTHONPATH": path,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_PLATFORMS": "cpu" if rehearse else os.environ.get("JAX_PLATFORMS"),
        "TRITON_INTERPRET": "1" if rehearse else None,
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
