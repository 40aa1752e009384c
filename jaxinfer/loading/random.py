"""Random weights for any configuration: to measure speed and memory, or to try a new family.

Drawn on the devices, each its own slice, from a seed and the parameter's path: the numbers are the
same however they are sharded (threefry counts positions, not calls).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from jaxinfer.models.functional import FunctionalModel, ParameterSpec, Weights


def random_weights(
    model: FunctionalModel,
    seed: int,
    *,
    shardings: Mapping[str, Sharding] | None = None,
    on_progress: Callable[[int], Any] = lambda num_bytes: None,
) -> Weights:
    """The model's weights in its own order: matrices normal with a variance of 1 / inputs, so that
    activations keep their size; norms' weights 1; biases and other corrections 0.

    `shardings` by parameter path; a parameter without one lies on the default device. `on_progress`
    gets the bytes of each parameter as it is asked for.
    """
    key = jax.random.key(seed)
    here = SingleDeviceSharding(jax.devices()[0])
    weights = []
    for spec in model.parameters:
        sharding = (shardings or {}).get(spec.path, here)
        own_key = jax.random.fold_in(key, zlib.crc32(spec.path.encode()))
        weights.append(_draw(own_key, spec, sharding))
        on_progress(spec.nbytes)
    return tuple(weights)


def _draw(key: jax.Array, spec: ParameterSpec, sharding: Sharding) -> jax.Array:
    *modules, name = spec.path.split(".")
    if "bias" in name:
        return jnp.zeros(spec.shape, spec.dtype, device=sharding)
    if any("norm" in module for module in modules[-2:]) or "norm" in name:
        return jnp.ones(spec.shape, spec.dtype, device=sharding)
    if len(spec.shape) < 2:  # sinks and other corrections
        return jnp.zeros(spec.shape, spec.dtype, device=sharding)
    # A table of vectors is read row by row, and as a tied head multiplied with its last axis.
    num_inputs = spec.shape[-1] if spec.axes[0] == "vocab" else spec.shape[-2]
    return _normal(key, num_inputs**-0.5, spec.shape, spec.dtype, sharding)


# One program a shape, type and sharding; scale and key are arguments.
@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _normal(
    key: jax.Array, scale: float, shape: tuple[int, ...], dtype: Any, sharding: Sharding
) -> jax.Array:
    values = jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
    return jax.lax.with_sharding_constraint(values, sharding)
