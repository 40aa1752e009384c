"""The measured cases of `bench_serve.py`: each starts scripts/serve.py itself."""
