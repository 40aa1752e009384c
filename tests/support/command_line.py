"""Run many command lines of `jaxinfer` in forks of one process that has imported JAX.

Importing is what takes long; each fork then imports the subcommand's module and parses its flags.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT


class Result(NamedTuple):
    """How one command line ended."""

    code: int
    stdout: str
    stderr: str


CHILD = """
import json, os, sys
from jaxinfer.cli.main import main

for number, words in enumerate(json.load(sys.stdin)):
    if not (child := os.fork()):
        for descriptor in (1, 2):
            path = f"{sys.argv[1]}/{number}.{descriptor}"
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_all(lines: Iterable[list[str]], folder: Path) -> dict[tuple[str, ...], Result]:
    """Run every command line, and return the results by its words; `folder` takes the outputs."""
    lines = list(lines)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(folder)],
        input=json.dumps(lines),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    texts = [[(folder / f"{i}.{n}").read_text() for n in (1, 2)] for i in range(len(lines))]
    codes = map(int, done.stdout.split())
    return {
        tuple(line): Result(code, *text)
        for line, code, text in zip(lines, codes, texts, strict=True)
    }
