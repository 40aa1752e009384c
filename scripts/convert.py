"""Convert a checkpoint once: parameters as the engine holds them, quantized or not, by Orbax."""

from absl import app

from jaxinfer.cli.convert import main

if __name__ == "__main__":
    app.run(main)
