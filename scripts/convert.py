"""Convert a checkpoint, quantized or not: `jaxinfer convert`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
