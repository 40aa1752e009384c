"""Measure generation beside Hugging Face transformers: `jaxinfer bench offline`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "offline", *sys.argv[1:]]))
