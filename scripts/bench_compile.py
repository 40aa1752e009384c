"""How long a step of each family takes to trace and to compile on this CPU, beside Llama's."""

from absl import app

from jaxinfer.tools.bench.compile_time import main

if __name__ == "__main__":
    app.run(main)
