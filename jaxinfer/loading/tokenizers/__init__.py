"""Tokenizers out of a model's files: Hugging Face directories and GGUF headers."""
