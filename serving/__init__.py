"""The server around an engine. Nothing here yet: use `LLM` or scripts/generate.py."""
