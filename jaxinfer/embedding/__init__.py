"""Texts to vectors: what `LLM.embed` and the server's embedding calls run."""
