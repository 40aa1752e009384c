"""What a model family is: config mapping, weight-name tables, and the module that computes it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxinfer.nn.layers import Numerics

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Transform:
    """From a stored tensor to a parameter: the stored shape it expects, and the change."""

    stored_shape: Callable[[Shape], Shape]
    apply: Callable[[np.ndarray, Shape], np.ndarray]


def _flat_after(axis: int) -> Callable[[Shape], Shape]:
    """Two-dimensional stored shape [out, in] of a parameter [in axes, out axes] cut at `axis`."""
    return lambda shape: (math.prod(shape[axis:]), math.prod(shape[:axis]))


def _transposed(stored: np.ndarray, shape: Shape) -> np.ndarray:
    return stored.T.reshape(shape)


def _halves_from_pairs(stored: np.ndarray, shape: Shape) -> np.ndarray:
    """Undo the GGUF converter's reordering of q and k rows, per head from (0, 1), (2, 3), ...
    (adjacent pairs turn together) back to (0, H/2), (1, H/2 + 1), ... (halves)."""
    heads, head_dim = shape[-2:]
    rows = stored.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2)
    return rows.reshape(heads * head_dim, -1)


AS_STORED = Transform(lambda shape: shape, lambda stored, shape: stored)
RESHAPED = Transform(lambda shape: (math.prod(shape),), lambda stored, shape: stored.reshape(shape))
# [out, in] -> [in, *out]: gate, up, down, head, and q, k, v with their heads unfolded.
LINEAR = Transform(_flat_after(1), _transposed)
# [out, in] -> [*in, out] with two input axes: the attention's output projection.
LINEAR_FROM_HEADS = Transform(_flat_after(2), _transposed)
LINEAR_PAIRED = Transform(
    _flat_after(1), lambda stored, shape: _transposed(_halves_from_pairs(stored, shape), shape)
)
BIAS_PAIRED = Transform(
    lambda shape: (math.prod(shape),),
    lambda stored, shape: _halves_from_pairs(stored, shape).reshape(shape),
)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row of a weight table: parameter path (regex), stored name (template), transform.

    Of several stored names, each is one item of the parameter's first dimension.
    """

    path: str
    stored: str | tuple[str, ...]
    transform: Transform = AS_STORED


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """Where a format keeps a family's parameters. `ignored`: stored names (regex) not wanted."""

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()

    def lookup(self, path: str) -> tuple[str | tuple[str, ...], Transform]:
        """The stored names and transform of the parameter at `path`; `KeyError` without any."""
        for weight in self.weights:
            if match := re.fullmatch(weight.path, path):
                if isinstance(weight.stored, str):
                    return match.expand(weight.stored), weight.transform
                return tuple(map(match.expand, weight.stored)), weight.transform
        raise KeyError(path)

    def is_ignored(self, stored: str) -> bool:
        return any(re.fullmatch(pattern, stored) for pattern in self.ignored)


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the registry (`models/__init__.py`).

    `config_from_hf` takes config.json's dict; `config_from_gguf` the file's key-values and its
    tensors' readers. Both return the family's config or raise `ValueError` naming what does not
    fit. `build(config, numerics)` makes the module; called under `nnx.eval_shape`.
    """

    name: str
    build: Callable[[Any, Numerics], nnx.Module]
    config_from_hf: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    hf_weights: WeightTable
    gguf_weights: WeightTable
