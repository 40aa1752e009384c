"""Compile every kernel and preset for chips that are not at hand: `jaxinfer compile-check`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compile-check", *sys.argv[1:]]))
