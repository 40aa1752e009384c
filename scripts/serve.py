"""Serve a model: gRPC, an HTTP API compatible with OpenAI's, and a page to talk to."""

from absl import app

from jaxinfer.cli.serve import main

if __name__ == "__main__":
    app.run(main)
