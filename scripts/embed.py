"""Embed texts with an encoder: `jaxinfer embed`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["embed", *sys.argv[1:]]))
