"""Rows by the matrix of their group, as in a mixture of experts; see `api.py`."""

from jaxinfer.kernels.grouped_matmul.api import BACKENDS, grouped_matmul

__all__ = ["BACKENDS", "grouped_matmul"]
