"""Read the quantized weights of every stored format: values, scales and zero points."""
