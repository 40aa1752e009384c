"""Offline speed, beside Hugging Face transformers, in one run on one machine."""

from absl import app

from jaxinfer.tools.bench.offline import main

if __name__ == "__main__":
    app.run(main)
