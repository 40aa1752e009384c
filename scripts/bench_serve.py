"""Measure a server under load: `jaxinfer bench serve`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
