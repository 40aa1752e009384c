"""Tell what XLA fuses by itself, and what a kernel saves, from programs compiled for each chip."""

import sys

from jaxinfer.cli.main import run
from jaxinfer.tools import fusion_table

if __name__ == "__main__":
    sys.exit(run("scripts/fusion_table.py", fusion_table, sys.argv[1:]))
