"""Triton on this machine: its interpreter, and a mark for tests that need it."""

from __future__ import annotations

import importlib.util

import pytest

_MISSING = [name for name in ("triton", "torch") if importlib.util.find_spec(name) is None]

needs_triton = pytest.mark.skipif(
    bool(_MISSING), reason=f"Triton's interpreter needs {' and '.join(_MISSING)}"
)
