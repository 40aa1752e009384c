"""The vocabulary in parts: which tokens a device holds, and how what the parts found is merged.

Inside `shard_map` a device of rank r (`collectives.rank`) along `vocab_axes` holds the logits of
tokens [r * n, (r + 1) * n), where V = n * parts. Without axes it holds all of them and everything
here is the identity: a program of one device has no trace of it. What is exchanged is of the size
of the answer, never V.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jaxinfer.sharding.collectives import Axes, all_gather, all_sum, local_shard, rank


def num_parts(vocab_axes: Axes) -> int:
    return lax.axis_size(vocab_axes) if vocab_axes else 1


def vocab_size(x: Shaped[Array, "R n"], vocab_axes: Axes) -> int:
    """V, of one device's part x [R, n]."""
    return x.shape[1] * num_parts(vocab_axes)


def global_ids(
    columns: Int32[Array, "*R"], x: Shaped[Array, "M n"], vocab_axes: Axes
) -> Int32[Array, "*R"]:
    """The tokens of columns of this device's part x."""
    return columns + rank(vocab_axes) * x.shape[1] if vocab_axes else columns


def columns_of(
    token_ids: Int32[Array, "*R"], x: Shaped[Array, "M n"], vocab_axes: Axes
) -> Int32[Array, "*R"]:
    """Where this device's part x [R, n] has these tokens; n, which a scatter drops, for others'."""
    if not vocab_axes:
        return token_ids
    n = x.shape[1]
    columns = token_ids - rank(vocab_axes) * n
    return jnp.where((columns >= 0) & (columns < n), columns, n)


def own_columns(x: Shaped[Array, "S V"], vocab_axes: Axes) -> Shaped[Array, "S n"]:
    """This device's part of an array that every device has whole."""
    return local_shard(x, vocab_axes, num_parts(vocab_axes), dim=1)


def all_parts(x: jax.Array, vocab_axes: Axes) -> Shaped[Array, "parts ..."]:
    """Everybody's x, stacked by rank."""
    return all_gather(x[None], vocab_axes, dim=0)


def is_true_of_all(x: Bool[Array, " R"], vocab_axes: Axes) -> Bool[Array, " R"]:
    """Of each row, whether every device says so."""
    return all_sum((~x).astype(jnp.int32), vocab_axes) == 0 if vocab_axes else x


def merge_first_largest(
    value: Float32[Array, " R"], token: Int32[Array, " R"], vocab_axes: Axes
) -> tuple[Float32[Array, " R"], Int32[Array, " R"]]:
    """The largest of all parts' values and its token; of equal ones, that of the lowest part. One
    gather of 8 bytes a row and part."""
    if not vocab_axes:
        return value, token
    values, tokens = _unpack(all_parts(_pack(value, token), vocab_axes), token.dtype)
    winner = jnp.argmax(values, axis=0)[None]
    take = lambda x: jnp.take_along_axis(x, winner, axis=0)[0]
    return take(values), take(tokens)


def merge_largest(
    values: Float32[Array, "R m"], beside: Shaped[Array, "R m"], limit: int, vocab_axes: Axes
) -> tuple[Float32[Array, "R k"], Shaped[Array, "R k"]]:
    """The largest `limit` (or all, if fewer) of all parts' values, descending, and what stands
    beside each, of 32 bits. One gather of 8 m bytes a row and part.

    Each part's values are descending, equal ones by their token; then so is the result.
    """
    if not vocab_axes:
        return values, beside
    packed = all_gather(_pack(values, beside), vocab_axes, dim=2)
    values, beside = _unpack(packed[None], beside.dtype)
    values, order = lax.top_k(values[0], min(limit, values.shape[2]))
    return values, jnp.take_along_axis(beside[0], order, axis=1)


def _pack(values: jax.Array, beside: jax.Array) -> jax.Array:
    """Two arrays of 32 bits as one: a collective costs by its start more than by so few bytes."""
    bits = lambda x: lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.stack([bits(values), bits(beside)])


def _unpack(packed: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Values and what is beside them, of [parts, 2, ...]."""
    as_type = lax.bitcast_convert_type
    return as_type(packed[:, 0], jnp.float32), as_type(packed[:, 1], dtype)
