"""Tell what XLA fuses by itself, and what a kernel saves, from programs compiled for each chip."""

from absl import app

from jaxinfer.tools.fusion_table import main

if __name__ == "__main__":
    app.run(main)
