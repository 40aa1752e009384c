"""Benchmarks of the engine and the server, beside peers."""
