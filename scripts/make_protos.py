"""Write the Python of every .proto in serving/protos, beside it; `--check` fails where it is
stale."""

from absl import app

from jaxinfer.tools.make_protos import main

if __name__ == "__main__":
    app.run(main)
