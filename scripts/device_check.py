"""Check every GPU kernel and the engine on the GPU at hand: `jaxinfer doctor`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
