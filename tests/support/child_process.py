"""Child processes for tests that need several devices: JAX fixes their number per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import shape_checks
from tests.support.paths import ROOT

# Compiling takes most of a child's time; its programs run for milliseconds.
IN_HASTE = "--xla_backend_optimization_level=0"


def findings(script: Path, *arguments: str, timeout_s: float = 600, **environment: str) -> Any:
    """Run a module of `tests.support` on the CPU, with shape checks; return the JSON it prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {IN_HASTE}"
    done = subprocess.run(
        [sys.executable, "-m", shape_checks.__name__, f"tests.support.{script.stem}", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
