"""Check the output folder of a conversion, and replace an older one atomically."""

from __future__ import annotations

import os
from pathlib import Path

from jaxinfer.loading.checkpoint import CheckpointError


def check_output(source: Path | None, output: Path, *, overwrite: bool) -> None:
    """Raise `CheckpointError` for an output folder that must not be written.

    That is a folder that exists, unless `overwrite`, and one that is the source, is inside it or
    contains it: replacing it would delete the source. `source` is None if it is not known yet.
    """
    if output.exists() and not overwrite:
        raise CheckpointError(f"{output}: exists; choose another folder, or pass --overwrite")
    if source is None:
        return
    target, original = output.resolve(), source.resolve()
    if target == original or target in original.parents or original in target.parents:
        raise CheckpointError(
            f"{output}: is the source {source}, is inside it or contains it; choose another folder"
        )


def replace_folder(new: Path, output: Path, aside: Path) -> None:
    """Rename `new` to `output`, after moving an existing `output` to `aside`.

    If that fails, the old folder is restored. All three must be on one file system.
    """
    try:
        if output.exists():
            os.replace(output, aside)
        os.replace(new, output)
    except BaseException:
        if aside.exists() and not output.exists():
            os.replace(aside, output)
        raise
