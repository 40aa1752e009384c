"""Build tokenizers from a model's files: Hugging Face directories and GGUF headers."""
