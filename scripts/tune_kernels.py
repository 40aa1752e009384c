"""Find the best tilings of the kernels: `jaxinfer tune`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
