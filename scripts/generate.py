"""Generate text on this machine: one prompt, a file of prompts, or a conversation."""

from absl import app

from jaxinfer.cli.generate import main

if __name__ == "__main__":
    app.run(main)
