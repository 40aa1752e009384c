"""The number types, forms of weights and kernels that a configuration asks of a model."""

from __future__ import annotations

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.paged_attention import BACKENDS
from jaxinfer.models.functional import Weights
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.quantized import Quantized
from jaxinfer.options import ConfigError


def numerics_for(config: EngineConfig) -> Numerics:
    """Return how a model is to compute. `dtype` "auto" is float32 on a CPU, where bfloat16 products
    are slow, and bfloat16 elsewhere. Raises `ConfigError` for an unknown attention backend."""
    backend = config.attention_backend
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(
            f"attention_backend is {backend!r}; this build has {', '.join(sorted(BACKENDS))}"
        )
    if backend == "hopper":
        raise ConfigError(
            "attention_backend is 'hopper', which runs only steps with prefill chunks; leave it "
            "unset (a Hopper GPU then uses it for such steps, and 'gpu' for others), or set 'gpu'"
        )
    name = config.dtype
    if name == "auto":
        name = "float32" if platform() == "cpu" else "bfloat16"
    return Numerics(jax.numpy.dtype(name), config.batch_invariant, backend)


def keeps_packed(config: EngineConfig) -> bool:
    """Return whether a checkpoint's quantized weights stay quantized on the device."""
    return config.weights == "packed" or (config.weights == "auto" and platform() != "cpu")


def check_weights(config: EngineConfig, weights: Weights) -> None:
    """Raise `ConfigError` if loaded weights do not have the form that the config asks for."""
    is_any_quantized = any(isinstance(w, Quantized) for w in weights)
    requested = {"weights": config.weights == "packed", "quantize": config.quantize is not None}
    if any(requested.values()) and not is_any_quantized:
        name = next(name for name, is_requested in requested.items() if is_requested)
        raise ConfigError(
            f"{name} is {getattr(config, name)!r}, but no weight is quantized: if the checkpoint "
            "is not, leave weights at 'auto' and set quantize to int8, int4 or float8; load "
            "weights that you pass yourself with keep_packed or quantize "
            "(loading.assign.load_weights)"
        )
    if config.weights == "dequantized" and config.quantize is None and is_any_quantized:
        raise ConfigError(
            "weights is 'dequantized', but some weights are quantized: load them without "
            "keep_packed, or set weights to 'auto'"
        )


def check_numerics(config: EngineConfig, numerics: Numerics) -> None:
    """Raise `ConfigError` if a model was built with other numerics than the config's."""
    requested = {
        "dtype": (config.dtype, numerics.dtype.name),
        "batch_invariant": (config.batch_invariant, numerics.batch_invariant),
        "attention_backend": (config.attention_backend, numerics.attention_backend),
    }
    problems = [
        f"{name} is {wanted!r}, but the model was built with {built!r}"
        for name, (wanted, built) in requested.items()
        if wanted not in ("auto", built)
    ]
    if problems:
        raise ConfigError("; ".join(problems) + ": build the model with the config's numerics")
