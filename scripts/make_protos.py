"""Generate the Python code of every .proto in serving/protos; `--check` fails if it is stale."""

import sys

from jaxinfer.cli.main import run
from jaxinfer.tools import make_protos

if __name__ == "__main__":
    sys.exit(run("scripts/make_protos.py", make_protos, sys.argv[1:]))
