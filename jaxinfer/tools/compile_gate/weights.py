"""A model's weights as abstract arguments of a program: shapes, types, shardings."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax

from jaxinfer.kernels.quantized_matmul.quant_array import pack_rows_for, quantize
from jaxinfer.loading.placement import tree_shardings
from jaxinfer.loading.quantize import Recipe, can_quantize, get_recipe
from jaxinfer.loading.splitting import device_dtype
from jaxinfer.loading.targets import LoadTarget, load_targets
from jaxinfer.models.functional import Weights
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight
from jaxinfer.parallel.sharded_model import ShardedModel
from jaxinfer.tools.compile_gate.target import Chip


def abstract_weights(chip: Chip, model: ShardedModel, kind: str | None) -> Weights:
    """The weights, quantized as `kind` (`EngineConfig.quantize`) says, in the order of
    `model.parameters`."""
    with chip.in_use():
        return tuple(_abstract(chip, target, kind) for target in load_targets(model))


def _abstract(chip: Chip, target: LoadTarget, kind: str | None) -> Any:
    weight: Any = jax.ShapeDtypeStruct(target.spec.shape, target.spec.dtype)
    if kind is not None and can_quantize(target.spec, recipe := get_recipe(kind)):
        weight = quantized_like(target, recipe)
    where = target.sharding and tree_shardings(weight, target.spec, target.sharding)
    return chip.abstract(weight, where)


def quantized_like(target: LoadTarget, recipe: Recipe) -> Quantized:
    """What a parameter becomes when it is quantized and cut for its devices
    (`quantize_parameter`, `splitting.divided`): groups of rows end where parts do."""
    spec = target.spec
    D = spec.shape[-2]
    rows = D // target.row_parts
    group = math.gcd(recipe.group_size(D), rows)
    made = jax.eval_shape(
        partial(
            quantize,
            bits=recipe.bits,
            group_size=group,
            has_zeros=recipe.has_zeros,
            is_float=recipe.is_float,
            scale_dtype=recipe.scale_dtype,
        ),
        jax.ShapeDtypeStruct(spec.shape, spec.dtype),
    )
    weight = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, device_dtype(a.dtype)), made)
    if recipe.bits == 4:
        weight = dataclasses.replace(weight, pack_rows=pack_rows_for(rows))
    if recipe.activation_dtype is None:
        return weight
    quantizes = partial(QuantWeight, activation_dtype=recipe.activation_dtype)
    own = target.sources[0]
    if own.axes[0] == "half":
        at = spec.axes.index("half")
        one = jax.tree.map(lambda a: _without(a, at), weight)
        return QuantPair(quantizes(one), quantizes(one))
    return quantizes(weight) if len(own.shape) == 2 else weight


def _without(array: Any, axis: int) -> Any:
    return jax.ShapeDtypeStruct(array.shape[:axis] + array.shape[axis + 1 :], array.dtype)
