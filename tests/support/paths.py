"""Folders of the repository, for tests that read files or start programs."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
REFERENCES = TESTS / "references"
SCRIPTS = ROOT / "scripts"
