"""Measure tracing and compiling of every family of models: `jaxinfer bench compile`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "compile", *sys.argv[1:]]))
