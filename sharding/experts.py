"""Expert parallelism: routing tokens to the devices of their experts, inside `shard_map`.

The experts are sharded over e devices, which all hold the same T tokens of B bytes; each token goes
to k experts. A row is one (token, choice) pair. There are two ways to compute the layer; each gives
every device the whole result.

Selecting (`select_local`, `restore_order`): a device takes the rows of its own experts from all
tokens, and the results are summed over the devices. Dispatching (`dispatch`, `combine`): a device
takes its share of the tokens, sends each row to its expert's device by all-to-all, receives the
results by another all-to-all, and the shares are gathered (GShard, arXiv:2006.16668, section 3.2;
no row is dropped here, so there is no capacity). Either way an expert computes the same rows. A
device sends, over ring collectives, with each expert's hidden units sharded over t further devices
and n = e t:

    select     2 (n - 1) / n  T B                                                   1 collective
    dispatch   (e - 1) / e  (2 k / e + 1)  T B  +  2 (t - 1) / t  T B / e           4, 5 if t > 1

With t = 1, dispatching sends fewer bytes if e > 2 k, and never less than half. In a step of few
tokens the three additional launches dominate: `should_dispatch` weighs both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from jaxinfer.kernels.dispatch import platform
from jaxinfer.sharding.collectives import Axes, all_gather, rank

# The launch cost of a collective as bytes on a link: 10 us at 100 GB/s, the order of both on NVLink
# and on a TPU's links. A setting, not a measurement.
LAUNCH_BYTES = 2**20


def should_dispatch(T: int, k: int, e: int, t: int, row_bytes: int) -> bool:
    """Return whether dispatching costs less than selecting, by the formula of this module.

    All arguments are static, so each bucket of a step compiles one of the two ways.
    """
    if e == 1:
        return False
    n, share = e * t, -(-T // e)
    select = 2 * (n - 1) / n * T * row_bytes
    send = (e - 1) / e * (2 * k + e) * share * row_bytes + 2 * (t - 1) / t * share * row_bytes
    more_launches = 3 + (t > 1)
    return send + more_launches * LAUNCH_BYTES < select


class ExpertRows(NamedTuple):
    """The rows of this device's experts, grouped by expert.

    `sizes` has the number of rows of each expert; the content after the last one is undefined.
    """

    rows: Shaped[Array, "rows ..."]
    sizes: Int[Array, " local"]


def select_local(
    x: Shaped[Array, "T ..."], experts: Int[Array, "T k"], num_experts: int, axes: Axes
) -> tuple[ExpertRows, Int[Array, " choices"]]:
    """Return the rows of this device's experts, and the order of all rows for `restore_order`.

    Without axes all experts are local. The result has room for T * min(k, local experts) rows: the
    experts of one token must be distinct.
    """
    k = experts.shape[1]
    expert = experts.reshape(-1)
    if axes:
        num_local = num_experts // lax.axis_size(axes)
        expert = expert - rank(axes) * jnp.int32(num_local)
        expert = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)
    else:
        num_local = num_experts
    order = jnp.argsort(expert)
    selected = order[: x.shape[0] * min(k, num_local)]
    return ExpertRows(x[selected // k], _count(expert, num_local)), order


def restore_order(
    out: Shaped[Array, "rows ..."], order: Int[Array, " choices"], k: int
) -> Shaped[Array, "T k ..."]:
    """Return the results of the rows that `select_local` took, by token; zero for all others.

    `out` must be zero after the experts' rows.
    """
    is_whole = len(out) == len(order)
    mode = "promise_in_bounds" if is_whole else "fill"
    by_row = out.at[jnp.argsort(order)].get(mode=mode, fill_value=0)
    return by_row.reshape(-1, k, *out.shape[1:])


class DispatchPlan(NamedTuple):
    """Where `dispatch` sent the rows; `combine` reverses it."""

    order: Int[Array, " choices"]  # the sent rows, sorted by expert
    sizes: Int[Array, "e local"]  # rows of each device for each local expert
    transfers: Int[Array, "e e"]  # rows that each device sent to each other


def dispatch(
    x: Shaped[Array, "T ..."], experts: Int[Array, "T k"], num_experts: int, axes: Axes
) -> tuple[ExpertRows, DispatchPlan]:
    """Send each row of this device's tokens x to the device of its expert.

    Uses two collectives: one for the numbers of rows, one for the rows. The result has room for all
    rows that may arrive, e * T * min(k, local experts): the experts of one token must be distinct.
    """
    e = lax.axis_size(axes)
    (T, k), num_local = experts.shape, num_experts // e
    expert = experts.reshape(-1)
    order = jnp.argsort(expert)
    counts = all_gather(_count(expert, num_experts)[None], axes, dim=0).reshape(e, e, num_local)
    plan = DispatchPlan(order, counts[:, rank(axes)], counts.sum(axis=2))
    max_rows = e * T * min(k, num_local)
    received = _exchange(x[order // k], plan.transfers, max_rows, axes)
    rows = received[_transposed_order(plan.sizes, max_rows)]
    return ExpertRows(rows, plan.sizes.sum(axis=0)), plan


def combine(
    out: Shaped[Array, "rows ..."], plan: DispatchPlan, k: int, axes: Axes
) -> Shaped[Array, "T k ..."]:
    """Return the results of dispatched rows to the devices that sent them, by token."""
    outgoing = out[_transposed_order(plan.sizes.T, len(out))]
    received = _exchange(outgoing, plan.transfers.T, len(plan.order), axes)
    return received[jnp.argsort(plan.order)].reshape(-1, k, *out.shape[1:])


def _count(expert: Int[Array, " rows"], num_experts: int) -> Int[Array, " E"]:
    return (expert[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)


def _starts(sizes: jax.Array) -> jax.Array:
    """Return the exclusive cumulative sum along the first axis."""
    return jnp.cumsum(sizes, axis=0) - sizes


def _transposed_order(sizes: Int[Array, "A B"], length: int) -> Int[Array, " length"]:
    """Return the indices that reorder runs of rows from the order of `sizes` to its transpose's.

    The lengths of the runs are known, so no sort is needed.
    """
    new_sizes = sizes.T.reshape(-1)
    old_starts = _starts(sizes.reshape(-1)).reshape(sizes.shape).T.reshape(-1)
    starts, index = _starts(new_sizes), jnp.arange(length, dtype=jnp.int32)
    run = (starts + new_sizes <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    return (old_starts - starts)[run] + index


def _exchange(
    rows: Shaped[Array, "rows ..."], transfers: Int[Array, "e e"], max_rows: int, axes: Axes
) -> Shaped[Array, "received ..."]:
    """Return the rows [max_rows, ...] for this device, ordered by sending device.

    `rows` are ordered by receiving device; `transfers[i, j]` rows go from device i to device j.
    """
    me = rank(axes)
    sent, received = transfers[me], transfers[:, me]
    # XLA has no ragged all-to-all for a CPU; for a v5e 2x4 and eight H100 it compiles to one.
    if platform() == "cpu":
        return _exchange_padded(rows, sent, received, max_rows, axes)
    return lax.ragged_all_to_all(
        rows,
        jnp.zeros((max_rows, *rows.shape[1:]), rows.dtype),
        _starts(sent),
        sent,
        _starts(transfers)[me],
        received,
        axis_name=axes,
    )


def _exchange_padded(
    rows: Shaped[Array, "rows ..."],
    sent: Int[Array, " e"],
    received: Int[Array, " e"],
    max_rows: int,
    axes: Axes,
) -> Shaped[Array, "received ..."]:
    """`_exchange` by a dense all-to-all, padded to the most rows that one device may send another.

    The experts' side has room for e times as many rows as the tokens' side.
    """
    e = len(sent)
    padded = max(len(rows), max_rows) // e
    index = jnp.arange(padded, dtype=jnp.int32)
    outgoing = rows[_starts(sent)[:, None] + index]
    arrived = lax.all_to_all(outgoing, axes, 0, 0, tiled=True)
    arrived = arrived.reshape(e * padded, *rows.shape[1:])
    index = jnp.arange(max_rows, dtype=jnp.int32)
    starts = _starts(received)
    sender = (starts + received <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    return arrived[sender * padded + index - starts[sender]]
