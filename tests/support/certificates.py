"""Certificates for tests, made on the spot by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

OPENSSL = shutil.which("openssl")


class Pair(NamedTuple):
    """PEM files."""

    certificate: str
    key: str


def make_authority(folder: Path, name: str) -> Pair:
    """A certificate that signs others."""
    pair = _pair(folder, name)
    _openssl("req", "-x509", *_new_key(pair), "-out", pair.certificate, "-subj", f"/CN={name}")
    return pair


def make_signed(folder: Path, name: str, authority: Pair) -> Pair:
    """A certificate for 127.0.0.1 and localhost, of a server or a client."""
    pair = _pair(folder, name)
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _openssl("req", *_new_key(pair), "-out", str(request), "-subj", f"/CN={name}")
    signer = ["-CA", authority.certificate, "-CAkey", authority.key, "-CAcreateserial"]
    files = ["-in", str(request), "-out", pair.certificate, "-extfile", str(extensions)]
    _openssl("x509", "-req", "-days", "2", *signer, *files)
    return pair


def _pair(folder: Path, name: str) -> Pair:
    return Pair(str(folder / f"{name}.crt"), str(folder / f"{name}.key"))


def _new_key(pair: Pair) -> list[str]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    return [*curve, "-nodes", "-keyout", pair.key]


def _openssl(*arguments: str) -> None:
    assert OPENSSL, "these tests need the openssl command"
    done = subprocess.run([OPENSSL, *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
