"""The compile gate: every kernel and every preset's whole step, compiled for chips not at hand."""

from absl import app

from jaxinfer.tools.compile_gate.check import main

if __name__ == "__main__":
    app.run(main)
