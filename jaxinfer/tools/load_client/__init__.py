"""A load client for OpenAI-compatible endpoints and this project's gRPC: see `bench_serve.py`."""
