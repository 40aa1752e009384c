"""A wheel of the project, built from a copy of the sources and installed outside the clone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy_examples import copied_paths
from tests.support.paths import ROOT

WAIT_S = 300.0
# What the project needs and the standard library lacks; a few stand for all.
NEEDED = "import jax, flax, orbax.checkpoint, gguf, fastapi, grpc, grpc_health"


def build_wheel(folder: Path) -> Path:
    """Build a wheel of exactly the files that the images copy."""
    source = folder / "source"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in copied_paths("Dockerfile.cpu"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", "."], source)
    [wheel] = folder.glob("jaxinfer-*.whl")
    return wheel


def python_with_dependencies(version: str) -> Path:
    """Find an interpreter of that version that has the dependencies; skip the test without one."""
    candidates: list[Path] = [ROOT / f".venv{version.replace('.', '')}" / "bin" / "python"]
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        candidates = [Path(sys.executable)]
    elif found := shutil.which(f"python{version}"):
        candidates.append(Path(found))
    for python in candidates:
        command = [str(python), "-c", NEEDED]
        if python.exists() and not subprocess.run(command, capture_output=True).returncode:
            return python
    reason = (
        f"no Python {version} with the dependencies of jaxinfer is here; "
        f"`make test PYTHON=python{version} VENV=.venv{version.replace('.', '')}` runs this with it"
    )
    print(reason)
    pytest.skip(reason)


class Installed:
    """A fresh virtual environment that holds the wheel, and sees another's dependencies."""

    def __init__(self, folder: Path, wheel: Path, python: Path):
        self.root = folder / "environment"
        self.home = folder  # programs run here, and keep their caches here
        self.bin = self.root / "bin"
        _run([str(python), "-m", "venv", "--without-pip", str(self.root)], folder)
        pip = [sys.executable, "-m", "pip", f"--python={self.bin / 'python'}"]
        _run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
        lines = "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\\n')"
        folders = _run([str(python), "-c", lines], folder).stdout
        # A folder named in a .pth file is searched, but its own .pth files are not read: an
        # editable install of the project there is not seen.
        [packages] = self.root.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(folders)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a program that runs here: nothing leads to the clone."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
        return inherited | {
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        return _run([str(self.bin / command[0]), *command[1:]], self.home, self.environment)

    @contextlib.contextmanager
    def serve(self, command: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Run a server, give what it prints once it is ready, and stop it as supervisors do."""
        with (self.home / "stderr").open("w+b") as log:
            server = subprocess.Popen(
                command,
                cwd=self.home,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                assert server.stdout is not None
                line = server.stdout.readline()
                log.seek(0)
                assert line, log.read().decode()
                yield json.loads(line)
                server.send_signal(signal.SIGTERM)
                assert server.wait(WAIT_S) == 0
            finally:
                server.kill()
                server.communicate()


def _run(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
    return done
