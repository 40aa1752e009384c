"""How long weights take to the device: one model as GGUF, as safetensors, and converted."""

from absl import app

from jaxinfer.tools.bench.loading import main

if __name__ == "__main__":
    app.run(main)
