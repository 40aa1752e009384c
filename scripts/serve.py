"""Serve a model over HTTP and gRPC: `jaxinfer serve`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
