"""Quantize a model's weights while loading an unquantized checkpoint."""

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

CHUNK_WEIGHTS = 2**18  # quantized at once; the float32 temporaries are a few times larger
MIN_COLUMNS = 32  # in a chunk: a cache line of bfloat16 is 32 numbers


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a matmul's weight is quantized, and its activations if `activation_dtype` is set."""

    bits: int
    max_group_size: int | None = None  # rows that share a scale; None: all D rows
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


# int4 checkpoints usually have groups of 128; with a float16 scale and zero point for each group
# they take 4.25 bits per weight.
RECIPES: Mapping[str, Recipe] = {
    "int8": Recipe(8),
    "int4": Recipe(4, max_group_size=128, has_zeros=True, scale_dtype=np.float16),
    "float8": Recipe(8, is_float=True),
    "int8_w8a8": Recipe(8, activation_dtype="int8"),
    "float8_w8a8": Recipe(8, is_float=True, activation_dtype="float8_e4m3fn"),
}


def get_recipe(kind: str) -> Recipe:
    """Return the recipe of this name; raise `ConfigError` if there is none."""
    if kind not in RECIPES:
        raise ConfigError(f"quantize is {kind!r}; it must be one of {', '.join(RECIPES)}")
    return RECIPES[kind]


def can_quantize(spec: ParameterSpec, recipe: Recipe) -> bool:
    """Whether the matmul of a parameter takes it quantized by the recipe.

    These are the matrices of linear layers, of gate and up, and of experts. The embedding, which a
    tied head shares, is not quantized.
    """
    return spec.packs == "matrix" and (recipe.bits == 8 or spec.shape[-2] % 2 == 0)


def quantize_parameter(spec: ParameterSpec, array: np.ndarray, recipe: Recipe) -> Quantized:
    """Quantize a parameter of `spec.shape` to NumPy arrays, in chunks of columns of one matrix."""
    *lead, D, F = array.shape
    group = recipe.group_size(D)

    def quantize_columns(item: tuple[int, ...], start: int) -> QuantArray:
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
            part = quantize_columns(item, start)
            if whole is None:
                whole = jax.tree.map(lambda a: np.empty((*lead, len(a), F), a.dtype), part)
            for target, source in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
                target[item][:, start : start + step] = source
    if recipe.activation_dtype is None:
        return whole
    as_weight = lambda weight: QuantWeight(weight, activation_dtype=recipe.activation_dtype)
    if spec.axes[0] == "half":
        return QuantPair(as_weight(whole[0]), as_weight(whole[1]))
    # The experts' matmul takes unquantized activations.
    return as_weight(whole) if array.ndim == 2 else whole
