"""Run the `jaxinfer` command as `python -m jaxinfer`."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
