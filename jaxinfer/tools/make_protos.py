"""Generate the Python modules of every .proto in serving/protos; `--check` fails if one is stale.

python scripts/make_protos.py [--check]
"""

from __future__ import annotations

import importlib.resources
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app, flags

ROOT = Path(str(importlib.resources.files("jaxinfer.serving"))) / "protos"
PACKAGE = "jaxinfer.serving.protos"  # the package of ROOT

_CHECK = flags.DEFINE_bool("check", False, "write nothing; exit 1 if a file is not as it would be")

# The compiler writes its version into its output; another version does not make a file stale.
_VERSIONS = (
    re.compile(r"^# Protobuf Python Version: .*$", re.MULTILINE),
    re.compile(r"(?<=Domain\.PUBLIC,)(\s+\d+,){3}\s+'.*?',"),
    re.compile(r"^GRPC_GENERATED_VERSION = .*$", re.MULTILINE),
)


def generate(root: Path = ROOT) -> dict[Path, str]:
    """Return the text of the modules of the .proto files below `root`, by path; nothing is
    written."""
    # Only a change of a .proto needs it.
    from grpc_tools import protoc

    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        well_known = importlib.resources.files("grpc_tools") / "_proto"
        command = ["protoc", f"-I{root}", f"-I{well_known}", *outputs, *names]
        if protoc.main(command) != 0:
            raise SystemExit(f"protoc could not compile {', '.join(names)}; it says why above")
        made = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {root / path.relative_to(folder): _repackage(path.read_text()) for path in made}


def stale(files: Mapping[Path, str]) -> list[Path]:
    """The paths of `files` whose text on disk is missing or differs."""
    return [
        path
        for path, text in files.items()
        if not path.is_file() or _without_versions(path.read_text()) != _without_versions(text)
    ]


def _repackage(text: str) -> str:
    """Make generated modules import each other from `PACKAGE` instead of the .proto files' root."""
    text = re.sub(
        r"^from (jaxinfer\.[\w.]+) import (\w+_pb2)",
        rf"from {PACKAGE}.\1 import \2",
        text,
        flags=re.M,
    )
    return re.sub(r"(?<=, ')(jaxinfer\.[\w.]+_pb2)(?=', _globals)", rf"{PACKAGE}.\1", text)


def _without_versions(text: str) -> str:
    for pattern in _VERSIONS:
        text = pattern.sub("", text)
    return text


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments are taken, and {argv[1:]} were given")
    files = generate()
    wrong = stale(files)
    if _CHECK.value:
        if wrong:
            names = ", ".join(str(path.relative_to(ROOT)) for path in wrong)
            sys.exit(f"stale: {names}; run python scripts/make_protos.py")
        return
    for path in wrong:
        path.write_text(files[path])
        print(f"wrote {path}")


if __name__ == "__main__":
    app.run(main)
