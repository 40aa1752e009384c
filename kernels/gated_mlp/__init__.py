"""The gated half of a feed-forward layer: two products and the activation in one; see `api.py`."""

from jaxinfer.kernels.gated_mlp.api import BACKENDS, gated_mlp

__all__ = ["BACKENDS", "gated_mlp"]
