"""From a configuration to how a model computes."""

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
    """The config's number types. `auto` is float32 on a CPU (bfloat16 products are slow there with
    the jax of Python 3.11) and bfloat16 elsewhere."""
    backend = config.attention_backend
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(
            f"attention_backend is {backend!r}; this build has {', '.join(sorted(BACKENDS))}"
        )
    if backend == "hopper":
        raise ConfigError(
            "attention_backend is 'hopper', which takes steps with prefill chunks alone; leave it "
            "unset (on a Hopper such steps take it, others 'gpu'), or say 'gpu' for all"
        )
    name = config.dtype
    if name == "auto":
        name = "float32" if platform() == "cpu" else "bfloat16"
    return Numerics(jax.numpy.dtype(name), config.batch_invariant, backend)


def keeps_packed(config: EngineConfig) -> bool:
    """Whether quantized weights of a checkpoint stay so on the device."""
    return config.weights == "packed" or (config.weights == "auto" and platform() != "cpu")


def check_weights(config: EngineConfig, weights: Weights) -> None:
    """The weights were loaded before: refuse a config that they do not honour."""
    is_any_quantized = any(isinstance(w, Quantized) for w in weights)
    asked = {"weights": config.weights == "packed", "quantize": config.quantize is not None}
    if any(asked.values()) and not is_any_quantized:
        name = next(name for name, is_asked in asked.items() if is_asked)
        raise ConfigError(
            f"{name} is {getattr(config, name)!r}, but no weight is quantized: of a checkpoint "
            "that is not, leave weights at 'auto' and set quantize to int8, int4 or float8; "
            "weights that you pass yourself, load with keep_packed or quantize "
            "(loading.assign.load_weights)"
        )
    if config.weights == "dequantized" and config.quantize is None and is_any_quantized:
        raise ConfigError(
            "weights is 'dequantized', but some weights are quantized: load them without "
            "keep_packed, or set weights to 'auto'"
        )


def check_numerics(config: EngineConfig, numerics: Numerics) -> None:
    """The model was built with numerics of its own: refuse a config that says otherwise."""
    asked = {
        "dtype": (config.dtype, numerics.dtype.name),
        "batch_invariant": (config.batch_invariant, numerics.batch_invariant),
        "attention_backend": (config.attention_backend, numerics.attention_backend),
    }
    problems = [
        f"{name} is {wanted!r}, but the model was built with {built!r}"
        for name, (wanted, built) in asked.items()
        if wanted not in ("auto", built)
    ]
    if problems:
        raise ConfigError("; ".join(problems) + ": build the model with the config's numerics")
