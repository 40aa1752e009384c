"""From a configuration to how a model computes."""

from __future__ import annotations

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.kernels.dispatch import platform
from jaxinfer.kernels.paged_attention import BACKENDS
from jaxinfer.nn.layers import Numerics
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
