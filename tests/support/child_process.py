"""Tests that need several devices: JAX fixes their number in a process, so a child has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

# Compiling takes most of a child's time, and its programs run for milliseconds.
IN_HASTE = "--xla_backend_optimization_level=0"


def findings(script: Path, *arguments: str, timeout_s: float = 600, **environment: str) -> Any:
    """Runs a module of `tests.support` on the CPU and returns the JSON that it prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {IN_HASTE}"
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{script.stem}", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
