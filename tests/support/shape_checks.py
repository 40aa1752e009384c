"""Run-time checks of the shapes stated in signatures, for the tests and the processes they start.

    python -m tests.support.shape_checks MODULE ARGUMENTS

runs a module with the checks installed. They must be installed before the first import of a module
of the checked packages.
"""

from __future__ import annotations

import runpy
import sys

from jaxtyping import install_import_hook

CHECKED = (
    "embedding.pooling",
    "embedding.sentences",
    "execution.forward",
    "execution.kv_cache",
    "kernels",
    "models",
    "nn",
    "parallel.forward",
    "parallel.pipeline",
    "sampling",
    "sharding",
)


def install() -> None:
    install_import_hook([f"jaxinfer.{name}" for name in CHECKED], "beartype.beartype")


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
