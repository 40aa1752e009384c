"""Generate the Python code of every .proto in serving/protos; `--check` fails if it is stale."""

from absl import app

from jaxinfer.tools.make_protos import main

if __name__ == "__main__":
    app.run(main)
