"""Plan a model on chips that are not at hand: `jaxinfer plan`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
