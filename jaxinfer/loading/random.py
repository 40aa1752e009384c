"""Draw random weights for any configuration, to measure speed and memory or to try a new family.

Each device draws its own slice, from the seed and the parameter's path. The numbers do not depend
on the sharding, because threefry is a function of positions, not of the order of calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Sharding, SingleDeviceSharding

from jaxinfer.loading.quantize import Recipe, can_quantize, get_recipe, quantize_parameter
from jaxinfer.loading.splitting import UnpackableError, place_whole
from jaxinfer.loading.targets import HeadRepeats, LoadTarget, load_targets
from jaxinfer.models.functional import FunctionalModel, Weights
from jaxinfer.nn.quantized import Quantized

if TYPE_CHECKING:
    from jaxinfer.parallel.sharded_model import ShardedModel


def random_weights(
    model: FunctionalModel | ShardedModel,
    seed: int,
    *,
    quantize: str | None = None,
    on_progress: Callable[[int], Any] = lambda num_bytes: None,
) -> Weights:
    """Draw the model's weights, in the order of its parameters.

    Matrices are normal with a variance of 1 / inputs, so that activations keep their magnitude;
    the weights of norms are 1; biases and other corrections are 0. `quantize` (a key of
    `quantize.RECIPES`) quantizes the weights of matmuls, each of which is drawn whole on one device
    of every process. `on_progress` is called with the bytes of each parameter when it is
    dispatched.
    """
    recipe = None if quantize is None else get_recipe(quantize)
    weights = []
    for target in load_targets(model):
        if recipe is not None and can_quantize(target.sources[0], recipe):
            weights.append(_quantized(target, seed, recipe))
        else:
            weights.append(_draw(target, seed))
        on_progress(target.nbytes)
    return tuple(weights)


def _quantized(target: LoadTarget, seed: int, recipe: Recipe) -> Any:
    def read(i: int) -> Quantized:
        spec = target.sources[i]
        return quantize_parameter(spec, np.asarray(_draw(LoadTarget(spec, (spec,)), seed)), recipe)

    try:
        return place_whole(target, read)
    except UnpackableError as why:
        logging.warning("%s is not quantized, because %s", target.spec.path, why)
        return _draw(target, seed)


def _draw(target: LoadTarget, seed: int) -> jax.Array:
    spec, source = target.spec, target.sources[0]
    sharding = target.sharding or SingleDeviceSharding(jax.local_devices()[0])
    *modules, name = spec.path.split(".")
    is_norm = any("norm" in module for module in modules[-2:]) or "norm" in name
    if is_norm and "bias" not in name:
        return jnp.ones(spec.shape, spec.dtype, device=sharding)
    if "bias" in name or len(source.shape) < 2:  # sinks and other corrections too
        return jnp.zeros(spec.shape, spec.dtype, device=sharding)
    # An embedding is looked up by row, and a tied head multiplies its last axis.
    num_inputs = source.shape[-1] if source.axes[0] == "vocab" else source.shape[-2]
    names = np.array([zlib.crc32(s.path.encode()) for s in target.sources], np.uint32)
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))  # the same in every process
    static = (source.shape, source.dtype, target.is_stacked, target.repeats, sharding)
    return _normal(key, names, num_inputs**-0.5, *static)


# One program per shape, type and sharding; scale, key and names are arguments.
@partial(jax.jit, static_argnames=("shape", "dtype", "is_stacked", "repeats", "sharding"))
def _normal(
    key: jax.Array,
    names: jax.Array,
    scale: float,
    shape: tuple[int, ...],
    dtype: Any,
    is_stacked: bool,
    repeats: HeadRepeats | None,
    sharding: Sharding,
) -> jax.Array:
    """Draw one parameter, or one for each of the names, stacked."""

    def draw(name: jax.Array) -> jax.Array:
        name_key = jax.random.fold_in(jax.random.wrap_key_data(key), name)
        values = jax.random.normal(name_key, shape, dtype) * jnp.asarray(scale, dtype)
        if repeats is None:
            return values
        index = repeats.stored_indices(repeats.repeated_shape(shape)[repeats.axis])
        return jnp.take(values, index, axis=repeats.axis)

    values = jax.vmap(draw)(names) if is_stacked else draw(names[0])
    return jax.lax.with_sharding_constraint(values, sharding)
