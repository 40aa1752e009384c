"""What a model family is: config mapping, weight-name tables, and the module that computes it."""

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


Rows = slice | np.ndarray


@dataclasses.dataclass(frozen=True)
class Transform:
    """From a stored tensor to a parameter: the stored shape it expects, and the change.

    `rows` says which of the tensor's rows (its first axis) are wanted, in which order: of a fused
    tensor some, of a permuted one all. `is_matrix`: it is stored as [outputs, inputs], and wanted
    the other way round, so that rows are outputs; quantized weights are read by these two alone.
    `keeps_inputs`: it is stored as wanted, save that some of its outputs may belong to others.
    """

    stored_shape: Callable[[Shape], Shape]
    apply: Callable[[np.ndarray, Shape], np.ndarray]
    rows: Callable[[Shape], Rows] | None = None
    is_matrix: bool = False
    keeps_inputs: bool = False

    def read(self, stored: np.ndarray, shape: Shape) -> np.ndarray:
        """The parameter of `shape` out of the stored tensor."""
        return self.apply(stored if self.rows is None else stored[self.rows(shape)], shape)


def _flat_after(axis: int) -> Callable[[Shape], Shape]:
    """Two-dimensional stored shape [out, in] of a parameter [in axes, out axes] cut at `axis`."""
    return lambda shape: (math.prod(shape[axis:]), math.prod(shape[:axis]))


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _transposed(stored: np.ndarray, shape: Shape) -> np.ndarray:
    return stored.T.reshape(shape)


def _reshaped(stored: np.ndarray, shape: Shape) -> np.ndarray:
    return stored.reshape(shape)


def halves_from_pairs(shape: Shape) -> np.ndarray:
    """Undo the GGUF converter's reordering of q and k rows, per head from (0, 1), (2, 3), ...
    (adjacent pairs turn together) back to (0, H/2), (1, H/2 + 1), ... (halves)."""
    heads, head_dim = shape[-2:]
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


AS_STORED = Transform(lambda shape: shape, lambda stored, shape: stored, keeps_inputs=True)
RESHAPED = Transform(_flat, _reshaped)
# [out, in] -> [in, *out]: gate, up, down, head, and q, k, v with their heads unfolded.
LINEAR = Transform(_flat_after(1), _transposed, is_matrix=True)
# [out, in] -> [*in, out] with two input axes: the attention's output projection.
LINEAR_FROM_HEADS = Transform(_flat_after(2), _transposed, is_matrix=True)
# [2 * out, in] -> [2, in, out]: gate and up in one tensor, gate's rows first.
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


def part_of(transform: Transform, start: int, total: int) -> Transform:
    """`transform` of a tensor that lies in a fused one of `total` rows, from row `start` on."""
    assert transform.rows is None

    def stored_shape(shape: Shape) -> Shape:
        return (total, *transform.stored_shape(shape)[1:])

    def rows(shape: Shape) -> Rows:
        return slice(start, start + transform.stored_shape(shape)[0])

    return dataclasses.replace(transform, stored_shape=stored_shape, rows=rows)


def every_other(start: int) -> Transform:
    """The outputs `start`, `start + 2`, ... of a tensor stored as wanted, [*in, 2 * out]."""
    return Transform(
        lambda shape: (*shape[:-1], 2 * shape[-1]),
        lambda stored, shape: stored[..., start::2],
        keeps_inputs=True,
    )


EACH = "{}"


@dataclasses.dataclass(frozen=True)
class Weight:
    """One row of a weight table: parameter path (regex), stored name (template), transform.

    Of several stored names, each is one item of the parameter's first dimension; a name with `{}`
    stands for one name an item, with the item's number in place of the braces. `other` is another
    way in which files of the format store it; it counts for a file that has all of its names.
    """

    path: str
    stored: str | tuple[str, ...]
    transform: Transform = AS_STORED
    other: Weight | None = None

    def names(self, path: str, dims: Shape) -> str | tuple[str, ...] | None:
        """The stored name of the parameter at `path`, or its items' names; None of another path."""
        match = re.fullmatch(self.path, path)
        if match is None:
            return None
        if isinstance(self.stored, tuple):
            return tuple(map(match.expand, self.stored))
        name = match.expand(self.stored)
        if EACH not in name:
            return name
        return tuple(name.replace(EACH, str(i)) for i in range(dims[0]))


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """Where a format keeps a family's parameters. `ignored`: stored names (regex) not wanted.

    `renamed`: (regex, template) for files that store the same tensors under other names; the first
    that matches a whole name makes it the one that `weights` and `ignored` speak of.
    """

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def known_name(self, stored: str) -> str:
        """The name by which this table knows a stored tensor."""
        for pattern, template in self.renamed:
            if match := re.fullmatch(pattern, stored):
                return match.expand(template)
        return stored

    def lookup(
        self, path: str, dims: Shape, there: Container[str] = ()
    ) -> tuple[str | tuple[str, ...], Transform]:
        """The stored names and transform of the parameter at `path`; `KeyError` without any.
        `there` are the names that the file has."""
        for weight in self.weights:
            if (names := weight.names(path, dims)) is None:
                continue
            if (other := weight.other) is not None:
                # One name first, all only if it is there: a config may claim any number of them.
                first = other.names(path, (1, *dims[1:]))
                if first and _as_tuple(first)[0] in there:
                    others = _as_tuple(other.names(path, dims) or ())
                    if all(name in there for name in others):
                        return others, other.transform
            return names, weight.transform
        raise KeyError(path)

    def is_ignored(self, stored: str) -> bool:
        return any(re.fullmatch(pattern, stored) for pattern in self.ignored)


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the registry (`models/__init__.py`).

    `config_from_hf` takes config.json's dict; `config_from_gguf` the file's key-values and its
    tensors' readers (None: no GGUF files of this family). Both return the family's config or raise
    `ValueError` naming what does not fit. `build(config, numerics)` makes the module; called under
    `nnx.eval_shape`. The tables are functions of the config, since where a fused tensor is cut
    depends on it.

    `restarts_at_limit`: what was computed of a sequence is computed anew, at its length then, when
    it passes the config's `length_limit`, as the reference's `generate` does for this family.

    A decoder's config has `vocab_size`, `num_layers`, `max_len`, `cache` (`ragged.CacheShape`)
    and `length_limit` (`DecoderConfig`); its module is called and has `logits` as `Decoder` does.
    Where it has `has_position_table`, and that is true, there are no positions past `max_len`. An
    encoder's has `vocab_size`, `num_layers`, `model_dim` and `max_len`; it has no cache.
    """

    name: str
    models: str  # the published models it runs, as docs/models.md names them
    build: Callable[[Any, Numerics], nnx.Module]
    config_from_hf: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    hf_weights: Callable[[Any], WeightTable]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None = None
    gguf_weights: Callable[[Any], WeightTable] | None = None
    restarts_at_limit: bool = False
