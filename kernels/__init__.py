"""Operators the models stand on, one folder each, a backend a platform.

A folder holds `api.py` (the front door: signature, formula, contract), `reference.py` (slow and
obvious, the truth of every test), `xla.py` (plain JAX, fast on a CPU) and, where they exist,
`tpu.py` (Pallas) and `gpu.py` (jax-triton). Nothing here knows of requests, models or servers.
"""
