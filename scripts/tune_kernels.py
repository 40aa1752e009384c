"""Autotuning: the best tiling of every kernel's case, on the device at hand or by a compiler."""

from absl import app

from jaxinfer.tools.tuner.tune import main

if __name__ == "__main__":
    app.run(main)
