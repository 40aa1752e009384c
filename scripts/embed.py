"""Embed texts on this machine with an encoder: BERT, RoBERTa, or a sentence model made of one."""

from absl import app

from jaxinfer.cli.embed import main

if __name__ == "__main__":
    app.run(main)
