"""Rows to the devices of their experts and back, inside `shard_map`.

Experts are split over e devices, all of which hold the same T tokens of B bytes; each token goes
to k experts. There are two forms, and both give every device the whole result.

Kept (`keep`, `put_back`): a device takes, of all tokens, the rows of its own experts, and the
results of all are summed. Sent (`send`, `give_back`): a device takes its share of the tokens, sends
each row to its expert's device by all-to-all, gets the results back by another, and the shares are
gathered (GShard, arXiv:2006.16668, section 3.2; here no row is ever dropped, so no capacity).
Either way an expert computes the same rows. What a device sends, by rings, where t more devices
split each expert's hidden units and n = e t:

    kept   2 (n - 1) / n  T B                                                       1 collective
    sent   (e - 1) / e  (2 k / e + 1)  T B  +  2 (t - 1) / t  T B / e               4, 5 if t > 1

Without t, sending is fewer bytes where e > 2 k, and never fewer than half. In a step of few tokens
the three more launches are what counts: `is_sent` weighs both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from jaxinfer.kernels.dispatch import platform
from jaxinfer.sharding.collectives import Axes, all_gather, rank

# What a link carries while a collective starts: 10 us at 100 GB/s, the order of both on NVLink and
# on a TPU's links. A setting, not a measurement.
LAUNCH_BYTES = 2**20


def is_sent(T: int, k: int, e: int, t: int, row_bytes: int) -> bool:
    """Whether sending costs less than keeping; the formula is in the module's text. All numbers are
    known when a step is compiled, so its buckets differ in it."""
    if e == 1:
        return False
    n, share = e * t, -(-T // e)
    kept = 2 * (n - 1) / n * T * row_bytes
    sent = (e - 1) / e * (2 * k + e) * share * row_bytes + 2 * (t - 1) / t * share * row_bytes
    more_launches = 3 + (t > 1)
    return sent + more_launches * LAUNCH_BYTES < kept


class Rows(NamedTuple):
    """The rows of this device's experts.

    `rows` lie expert by expert, `sizes` of each; behind the last one may lie anything.
    """

    rows: Shaped[Array, "rows ..."]
    sizes: Int[Array, " held"]


def keep(
    x: Shaped[Array, "T ..."], experts: Int[Array, "T k"], num_experts: int, axes: Axes
) -> tuple[Rows, Int[Array, " choices"]]:
    """Of the rows (token, choice), those of this device's experts, and all rows' order, by which
    `put_back` finds them. Without axes all experts are this device's.

    `rows` has room for T * min(k, experts held): a token's experts are distinct.
    """
    k = experts.shape[1]
    expert = experts.reshape(-1)
    if axes:
        held = num_experts // lax.axis_size(axes)
        expert = expert - rank(axes) * jnp.int32(held)
        expert = jnp.where((expert >= 0) & (expert < held), expert, held)
    else:
        held = num_experts
    order = jnp.argsort(expert)
    taken = order[: x.shape[0] * min(k, held)]
    return Rows(x[taken // k], _counts(expert, held)), order


def put_back(
    out: Shaped[Array, "rows ..."], order: Int[Array, " choices"], k: int
) -> Shaped[Array, "T k ..."]:
    """What became of the rows that `keep` took, each in its token's place; zero for the others.
    `out` must be zero behind the experts' rows."""
    is_whole = len(out) == len(order)
    mode = "promise_in_bounds" if is_whole else "fill"
    found = out.at[jnp.argsort(order)].get(mode=mode, fill_value=0)
    return found.reshape(-1, k, *out.shape[1:])


class Way(NamedTuple):
    """How rows came to their experts."""

    order: Int[Array, " choices"]  # of the rows sent, in that of their experts
    sizes: Int[Array, "e held"]  # rows of each device for each expert held here
    between: Int[Array, "e e"]  # rows that each device sent to each


def send(
    x: Shaped[Array, "T ..."], experts: Int[Array, "T k"], num_experts: int, axes: Axes
) -> tuple[Rows, Way]:
    """Each row (token, choice) to the device of its expert; x are this device's own tokens.

    Two collectives: all learn how many rows go where, then the rows go. `rows` has room for all
    that may come, e * T * min(k, experts held): a token's experts must be distinct.
    """
    e = lax.axis_size(axes)
    (T, k), held = experts.shape, num_experts // e
    expert = experts.reshape(-1)
    order = jnp.argsort(expert)
    counts = all_gather(_counts(expert, num_experts)[None], axes, dim=0).reshape(e, e, held)
    way = Way(order, counts[:, rank(axes)], counts.sum(axis=2))
    room = e * T * min(k, held)
    came = _exchange(x[order // k], way.between, room, axes)
    return Rows(came[_regrouped(way.sizes, room)], way.sizes.sum(axis=0)), way


def give_back(
    out: Shaped[Array, "rows ..."], way: Way, k: int, axes: Axes
) -> Shaped[Array, "T k ..."]:
    """What became of the rows that `send` sent, each to its device and its token's place."""
    going = out[_regrouped(way.sizes.T, len(out))]
    came = _exchange(going, way.between.T, len(way.order), axes)
    return came[jnp.argsort(way.order)].reshape(-1, k, *out.shape[1:])


def _counts(expert: Int[Array, " rows"], num_experts: int) -> Int[Array, " E"]:
    return (expert[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)


def _starts(sizes: jax.Array) -> jax.Array:
    """Along the first axis."""
    return jnp.cumsum(sizes, axis=0) - sizes


def _regrouped(sizes: Int[Array, "A B"], length: int) -> Int[Array, " length"]:
    """Runs of rows lie one behind the other, in the order of `sizes`; they shall lie in the order
    of its transpose: for each place there, the place here. No sort: the runs are known."""
    new_sizes = sizes.T.reshape(-1)
    from_starts = _starts(sizes.reshape(-1)).reshape(sizes.shape).T.reshape(-1)
    starts, place = _starts(new_sizes), jnp.arange(length, dtype=jnp.int32)
    run = (starts + new_sizes <= place[:, None]).sum(axis=1, dtype=jnp.int32)
    return (from_starts - starts)[run] + place


def _exchange(rows: jax.Array, between: Int[Array, "e e"], room: int, axes: Axes) -> jax.Array:
    """[room, ...]: the rows for this device, by the device that they come from, in its order.

    `rows` lie by the device that they are for; `between[i, j]` of them go from i to j.
    """
    me = rank(axes)
    sent, received = between[me], between[:, me]
    # XLA has no ragged all-to-all for a CPU; for a v5e 2x4 and eight H100 it compiles as one.
    if platform() == "cpu":
        return _exchange_padded(rows, sent, received, room, axes)
    return lax.ragged_all_to_all(
        rows,
        jnp.zeros((room, *rows.shape[1:]), rows.dtype),
        _starts(sent),
        sent,
        _starts(between)[me],
        received,
        axis_name=axes,
    )


def _exchange_padded(rows: jax.Array, sent, received, room: int, axes: Axes) -> jax.Array:
    """The same with as many rows between any two as there may be: the experts' side has room for e
    times as many."""
    e = len(sent)
    most = max(len(rows), room) // e
    place = jnp.arange(most, dtype=jnp.int32)
    going = rows[_starts(sent)[:, None] + place]
    came = lax.all_to_all(going, axes, 0, 0, tiled=True).reshape(e * most, *rows.shape[1:])
    place = jnp.arange(room, dtype=jnp.int32)
    starts = _starts(received)
    sender = (starts + received <= place[:, None]).sum(axis=1, dtype=jnp.int32)
    return came[sender * most + place - starts[sender]]
