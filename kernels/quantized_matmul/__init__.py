"""A product with quantized weights; see `api.py`, and `quant_array.py` for the weights."""

from jaxinfer.kernels.quantized_matmul.api import (
    ACTIVATION_BACKENDS,
    BACKENDS,
    quantize_activations,
    quantized_matmul,
)
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, dequantize, quantize

__all__ = [
    "ACTIVATION_BACKENDS",
    "BACKENDS",
    "QuantArray",
    "dequantize",
    "quantize",
    "quantize_activations",
    "quantized_matmul",
]
