"""The device check: every GPU kernel and the engine on the GPU at hand, in one command."""

from absl import app

from jaxinfer.tools.device_check.check import main

if __name__ == "__main__":
    app.run(main)
