"""The folder that a conversion writes: what it may be, and how it takes the place of an old one."""

from __future__ import annotations

import os
from pathlib import Path

from jaxinfer.loading.checkpoint import CheckpointError


def check_output(source: Path | None, output: Path, *, overwrite: bool) -> None:
    """Refuse (`CheckpointError`) a folder that is there already, unless `overwrite`, and one that
    is the source, lies in it or holds it: to replace it would take the source away. `source` None:
    not known yet."""
    if output.exists() and not overwrite:
        raise CheckpointError(f"{output}: exists; choose another folder, or pass --overwrite")
    if source is None:
        return
    ours, theirs = output.resolve(), source.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise CheckpointError(
            f"{output}: is the source {source}, lies in it or holds it; choose a folder beside it"
        )


def put_in_place(new: Path, output: Path, aside: Path) -> None:
    """Rename `new` to `output`; what is there goes `aside`, and comes back if that fails. All
    three on one file system."""
    try:
        if output.exists():
            os.replace(output, aside)
        os.replace(new, output)
    except BaseException:
        if aside.exists() and not output.exists():
            os.replace(aside, output)
        raise
