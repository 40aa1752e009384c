"""Quantizing a model's weights here, for checkpoints that are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, quantize
from jaxinfer.models.functional import ParameterSpec
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight
from jaxinfer.options import ConfigError

CHUNK_WEIGHTS = 2**18  # quantized at once: the temporaries are float32, a few for each weight
MIN_COLUMNS = 32  # of a chunk: a cache line of bfloat16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a product's weight is quantized, and x with it where `activation_dtype` is set."""

    bits: int
    max_group_size: int | None = None  # rows that share a scale, where D allows; None: all of D
    has_zeros: bool = False
    is_float: bool = False
    scale_dtype: Any = np.float32
    activation_dtype: str | None = None

    def group_size(self, D: int) -> int:
        """Return the group size for D rows.

        It is the largest power of two up to `max_group_size` that divides D, or D itself if that
        is below 16 or `max_group_size` is None.
        """
        if self.max_group_size is None:
            return D
        group = min(self.max_group_size, D & -D)
        return group if group >= 16 else D


# Groups of 128 are what int4 checkpoints have; with their float16 scale and zero point they take
# 4.25 bits a weight.
RECIPES: Mapping[str, Recipe] = {
    "int8": Recipe(8),
    "int4": Recipe(4, max_group_size=128, has_zeros=True, scale_dtype=np.float16),
    "float8": Recipe(8, is_float=True),
    "int8_w8a8": Recipe(8, activation_dtype="int8"),
    "float8_w8a8": Recipe(8, is_float=True, activation_dtype="float8_e4m3fn"),
}


def get_recipe(kind: str) -> Recipe:
    """`ConfigError` for an unknown `kind`."""
    if kind not in RECIPES:
        raise ConfigError(f"quantize is {kind!r}; it must be one of {', '.join(RECIPES)}")
    return RECIPES[kind]


def can_quantize(spec: ParameterSpec, recipe: Recipe) -> bool:
    """Whether it is a matrix that its product takes quantized so: of linear layers, of gate and up,
    and of experts. The embedding, which a tied head shares, stays as it is."""
    return spec.packs == "matrix" and (recipe.bits == 8 or spec.shape[-2] % 2 == 0)


def quantize_parameter(spec: ParameterSpec, array: np.ndarray, recipe: Recipe) -> Quantized:
    """A parameter of `spec.shape`, in NumPy arrays, a chunk of columns of one matrix at a time."""
    *lead, D, F = array.shape
    group = recipe.group_size(D)

    def of_columns(item: tuple[int, ...], start: int) -> QuantArray:
        return quantize(
            np.asarray(array[item][:, start : start + step]),
            recipe.bits,
            group,
            recipe.has_zeros,
            is_float=recipe.is_float,
            scale_dtype=recipe.scale_dtype,
        )

    step = max(MIN_COLUMNS, CHUNK_WEIGHTS // D)
    whole: Any = None
    for item in np.ndindex(*lead):
        for start in range(0, F, step):
            part = of_columns(item, start)
            if whole is None:
                whole = jax.tree.map(lambda a: np.empty((*lead, len(a), F), a.dtype), part)
            for target, source in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
                target[item][:, start : start + step] = source
    if recipe.activation_dtype is None:
        return whole
    quantizes = lambda weight: QuantWeight(weight, activation_dtype=recipe.activation_dtype)
    if spec.axes[0] == "half":
        return QuantPair(quantizes(whole[0]), quantizes(whole[1]))
    # A product of experts takes x as it is.
    return quantizes(whole) if array.ndim == 2 else whole
