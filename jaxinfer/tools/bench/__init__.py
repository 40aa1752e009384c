"""Benchmarks of the engine and the server, compared with peers."""
