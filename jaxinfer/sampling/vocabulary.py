"""The sharded vocabulary: the tokens of each device, and the merging of the devices' results.

Inside `shard_map` a device of rank r (`collectives.rank`) along `vocab_axes` has the logits of
tokens [r * n, (r + 1) * n), where V = n * parts. Without axes it has all logits, and every function
here is the identity, so a program for one device does not change. The devices exchange data of the
size of the result, never of V.
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
    """Return V, given one device's part x [R, n]."""
    return x.shape[1] * num_parts(vocab_axes)


def global_ids(
    columns: Int32[Array, "*R"], x: Shaped[Array, "M n"], vocab_axes: Axes
) -> Int32[Array, "*R"]:
    """Return the token ids of columns of this device's part x."""
    return columns + rank(vocab_axes) * x.shape[1] if vocab_axes else columns


def columns_of(
    token_ids: Int32[Array, "*R"], x: Shaped[Array, "M n"], vocab_axes: Axes
) -> Int32[Array, "*R"]:
    """Return the columns of these tokens in this device's part x [R, n].

    Tokens of other devices get n, which a scatter drops.
    """
    if not vocab_axes:
        return token_ids
    n = x.shape[1]
    columns = token_ids - rank(vocab_axes) * n
    return jnp.where((columns >= 0) & (columns < n), columns, n)


def own_columns(x: Shaped[Array, "S V"], vocab_axes: Axes) -> Shaped[Array, "S n"]:
    """Return this device's part of a replicated array."""
    return local_shard(x, vocab_axes, num_parts(vocab_axes), dim=1)


def all_parts(x: jax.Array, vocab_axes: Axes) -> Shaped[Array, "parts ..."]:
    """Return the x of all devices, stacked by rank."""
    return all_gather(x[None], vocab_axes, dim=0)


def is_true_of_all(x: Bool[Array, " R"], vocab_axes: Axes) -> Bool[Array, " R"]:
    """Return, for each row, whether x is true on every device."""
    return all_sum((~x).astype(jnp.int32), vocab_axes) == 0 if vocab_axes else x


def merge_first_largest(
    value: Float32[Array, " R"], token: Int32[Array, " R"], vocab_axes: Axes
) -> tuple[Float32[Array, " R"], Int32[Array, " R"]]:
    """Return the largest value of all parts and its token; of equal values, the lowest part's.

    Takes one gather of 8 bytes a row and part.
    """
    if not vocab_axes:
        return value, token
    values, tokens = _unpack(all_parts(_pack(value, token), vocab_axes), token.dtype)
    winner = jnp.argmax(values, axis=0)[None]
    take = lambda x: jnp.take_along_axis(x, winner, axis=0)[0]
    return take(values), take(tokens)


def merge_largest(
    values: Float32[Array, "R m"], beside: Shaped[Array, "R m"], limit: int, vocab_axes: Axes
) -> tuple[Float32[Array, "R k"], Shaped[Array, "R k"]]:
    """Return the `limit` largest values (all if fewer) of all parts, descending, and `beside`.

    `beside` has 32-bit elements that accompany the values. Takes one gather of 8 m bytes a row and
    part. If each part's values are descending, equal ones by token, then so is the result.
    """
    if not vocab_axes:
        return values, beside
    packed = all_gather(_pack(values, beside), vocab_axes, dim=2)
    values, beside = _unpack(packed[None], beside.dtype)
    values, order = lax.top_k(values[0], min(limit, values.shape[2]))
    return values, jnp.take_along_axis(beside[0], order, axis=1)


def _pack(values: jax.Array, beside: jax.Array) -> jax.Array:
    """Stack two 32-bit arrays, because the launch of a collective costs more than so few bytes."""
    bits = lambda x: lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.stack([bits(values), bits(beside)])


def _unpack(packed: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Split [parts, 2, ...] into values and their companions."""
    as_type = lax.bitcast_convert_type
    return as_type(packed[:, 0], jnp.float32), as_type(packed[:, 1], dtype)
