"""A residual sum and the norm of it in one pass over memory; see `api.py`."""

from jaxinfer.kernels.add_norm.api import BACKENDS, add_layer_norm, add_rms_norm

__all__ = ["BACKENDS", "add_layer_norm", "add_rms_norm"]
