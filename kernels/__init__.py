"""The operators that models are made of: one folder each, with a backend for each platform.

A folder has `api.py` (signature, formula, contract), `reference.py` (slow and obvious, the
reference of every test), `xla.py` (plain JAX, fast on a CPU) and, where they exist, `tpu.py`
(Pallas) and `gpu.py` (jax-triton). Nothing here depends on requests, models or servers.
"""
