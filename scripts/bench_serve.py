"""A load client for servers of language models, and this project's serving benchmark."""

from absl import app

from jaxinfer.tools.bench.serve import main

if __name__ == "__main__":
    app.run(main)
