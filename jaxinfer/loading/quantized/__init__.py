"""Quantized weights of every stored format, read as they are: values, scales and zero points."""
