"""What XLA fuses by itself, and what a kernel has over it, by the compiled text of each chip."""

from absl import app

from jaxinfer.tools.fusion_table import main

if __name__ == "__main__":
    app.run(main)
