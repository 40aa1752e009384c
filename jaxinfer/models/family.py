"""A model family: how its configurations and weights are read, and the module that runs it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxinfer.nn.layers import Numerics

Shape = tuple[int, ...]
RowIndex = slice | np.ndarray


@dataclasses.dataclass(frozen=True)
class Transform:
    """How a stored tensor becomes a parameter: the stored shape it expects, and the change.

    `rows` selects rows (along the first axis) of the tensor: some rows of a fused tensor, or all
    rows of a permuted one, in another order. `is_matrix` says that the tensor is stored as
    [outputs, inputs] and is transposed, so that its rows are outputs; quantized weights are read by
    these two fields alone. `keeps_inputs` says that the tensor is stored as [inputs, outputs],
    possibly with outputs of other parameters.
    """

    stored_shape: Callable[[Shape], Shape]
    apply: Callable[[np.ndarray, Shape], np.ndarray]
    rows: Callable[[Shape], RowIndex] | None = None
    is_matrix: bool = False
    keeps_inputs: bool = False

    def read(self, stored: np.ndarray, shape: Shape) -> np.ndarray:
        """Return the parameter of `shape` from the stored tensor."""
        return self.apply(stored if self.rows is None else stored[self.rows(shape)], shape)


def _flat_after(axis: int) -> Callable[[Shape], Shape]:
    """Return the stored shape [out, in] of a parameter [in axes, out axes] split at `axis`."""
    return lambda shape: (math.prod(shape[axis:]), math.prod(shape[:axis]))


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _transposed(stored: np.ndarray, shape: Shape) -> np.ndarray:
    return stored.T.reshape(shape)


def _reshaped(stored: np.ndarray, shape: Shape) -> np.ndarray:
    return stored.reshape(shape)


def halves_from_pairs(shape: Shape) -> np.ndarray:
    """Return the row order that undoes the GGUF converter's reordering of q and k rows.

    In each head the converter makes RoPE rotate adjacent pairs (0, 1), (2, 3), ...; here RoPE
    rotates halves (0, H/2), (1, H/2 + 1), ...
    """
    heads, head_dim = shape[-2:]
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


AS_STORED = Transform(lambda shape: shape, lambda stored, shape: stored, keeps_inputs=True)
RESHAPED = Transform(_flat, _reshaped)
# [out, in] -> [in, *out]: gate, up, down, head, and q, k, v (whose out is [N, H]).
LINEAR = Transform(_flat_after(1), _transposed, is_matrix=True)
# [out, in] -> [*in, out] with two input axes: the attention's output projection.
LINEAR_FROM_HEADS = Transform(_flat_after(2), _transposed, is_matrix=True)
# [2 * out, in] -> [2, in, out]: gate and up in one tensor, gate first.
LINEAR_JOINED = Transform(
    lambda shape: (shape[0] * shape[2], shape[1]),
    lambda stored, shape: stored.reshape(shape[0], shape[2], -1).swapaxes(1, 2),
    is_matrix=True,
)
# [E, out, in] -> [E, in, out]: the matrices of all experts in one tensor.
LINEAR_STACKED = Transform(
    lambda shape: (*shape[:-2], shape[-1], shape[-2]),
    lambda stored, shape: stored.swapaxes(-1, -2),
    is_matrix=True,
)
LINEAR_PAIRED = dataclasses.replace(LINEAR, rows=halves_from_pairs)
BIAS_PAIRED = dataclasses.replace(RESHAPED, rows=halves_from_pairs)


def fused_part(transform: Transform, start: int, total: int) -> Transform:
    """Return `transform` for a part of a fused tensor of `total` rows that begins at `start`."""
    assert transform.rows is None

    def stored_shape(shape: Shape) -> Shape:
        return (total, *transform.stored_shape(shape)[1:])

    def rows(shape: Shape) -> RowIndex:
        return slice(start, start + transform.stored_shape(shape)[0])

    return dataclasses.replace(transform, stored_shape=stored_shape, rows=rows)


def every_other(start: int) -> Transform:
    """Return a transform to the outputs `start`, `start + 2`, ... of a tensor [*in, 2 * out]."""
    return Transform(
        lambda shape: (*shape[:-1], 2 * shape[-1]),
        lambda stored, shape: stored[..., start::2],
        keeps_inputs=True,
    )


ITEM_NUMBER = "{}"


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row of a weight table: parameter path (regex), stored name (template), transform.

    With several stored names, each is one item of the parameter's first dimension. A name with `{}`
    stands for one name per item, with the item's number in place of the braces. `alternative` is
    another way in which files of the format store the parameter; it is used for a file that has all
    of its names.
    """

    path: str
    stored: str | tuple[str, ...]
    transform: Transform = AS_STORED
    alternative: Weight | None = None

    def names(self, path: str, dims: Shape) -> str | tuple[str, ...] | None:
        """Return the stored name or names of the parameter at `path`; None for another path."""
        match = re.fullmatch(self.path, path)
        if match is None:
            return None
        if isinstance(self.stored, tuple):
            return tuple(map(match.expand, self.stored))
        name = match.expand(self.stored)
        if ITEM_NUMBER not in name:
            return name
        return tuple(name.replace(ITEM_NUMBER, str(i)) for i in range(dims[0]))


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """Where a format stores a family's parameters; `ignored` are stored names (regex) not needed.

    `renamed` has pairs (regex, template) for files that store the same tensors under other names.
    The first regex that matches a whole name turns it into the one in `weights` and `ignored`.
    """

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def known_name(self, stored: str) -> str:
        """Return the name that this table has for a stored tensor."""
        for pattern, template in self.renamed:
            if match := re.fullmatch(pattern, stored):
                return match.expand(template)
        return stored

    def lookup(
        self, path: str, dims: Shape, available: Container[str] = ()
    ) -> tuple[str | tuple[str, ...], Transform]:
        """Return the stored names and the transform of the parameter at `path`.

        `available` are the names that the file has. Raises `KeyError` if no row matches.
        """
        for weight in self.weights:
            if (names := weight.names(path, dims)) is None:
                continue
            if (alternative := weight.alternative) is not None:
                # Test one name before listing all: a config may claim any number of them.
                first = alternative.names(path, (1, *dims[1:]))
                if first and _as_tuple(first)[0] in available:
                    others = _as_tuple(alternative.names(path, dims) or ())
                    if all(name in available for name in others):
                        return others, alternative.transform
            return names, weight.transform
        raise KeyError(path)

    def is_ignored(self, stored: str) -> bool:
        return any(re.fullmatch(pattern, stored) for pattern in self.ignored)


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the registry (`models/__init__.py`).

    `config_from_hf` takes config.json's dict; `config_from_gguf` takes the file's key-values and
    the readers of its tensors (None: the family has no GGUF files). Both return the family's config
    or raise `ValueError` naming what is not supported. `build(config, numerics)` makes the module
    and is called under `nnx.eval_shape`. The weight tables are functions of the config, because it
    decides where a fused tensor is split.

    `restarts_at_limit` says that a sequence that passes the config's `length_limit` is recomputed
    with its new length, as the reference's `generate` does for this family.

    A decoder's config has `vocab_size`, `num_layers`, `max_len`, `cache` (`ragged.CacheShape`)
    and `length_limit` (as in `DecoderConfig`), and its module has the methods of `Decoder`. If it
    has `has_position_table` and that is true, there are no positions past `max_len`. An encoder's
    config has `vocab_size`, `num_layers`, `model_dim` and `max_len`; it has no cache.
    """

    name: str
    models: str  # the published models it runs, as listed in docs/models.md
    build: Callable[[Any, Numerics], nnx.Module]
    config_from_hf: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    hf_weights: Callable[[Any], WeightTable]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None = None
    gguf_weights: Callable[[Any], WeightTable] | None = None
    restarts_at_limit: bool = False
