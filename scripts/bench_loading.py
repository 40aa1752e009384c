"""Measure the loading of weights from each format: `jaxinfer bench loading`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "loading", *sys.argv[1:]]))
